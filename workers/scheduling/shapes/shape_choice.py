"""Chooses the tree shape that a step drafts, and verifies if possible: the one with the most tokens per millisecond.
The scheduler calls `choose` once per step and reports accepted drafts to `acceptance`; `StepTime` predicts times.

Shapes that seem worse than the best are probed for a few steps, paid from a credit of time that each step adds to:
every shape is measured eventually, and probes cost a bounded share of the time. Pure: time is counted in steps, and
equal calls have equal results.
"""

import math
from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.shapes.acceptance import Acceptance
from aerie.workers.scheduling.shapes.shape_rates import KNOWN_ERROR, Load, Rates
from aerie.workers.scheduling.step_time import Step, StepTime

FIRST_RESULTS = 3  # steps from a shape's first round to its result on the host
PROBING_SHARE = 1 / 150  # credit per step for probes of promising shapes, in rounds
OLD_SHARE = 1 / 500  # the same for probes of shapes without recent results
FIRST_CREDIT, MAX_CREDIT = 4.0, 9.0  # rounds; bounds what one probe may cost
PAID_SHARE = 1 / 2  # share of the cost of a promising shape's first rounds that the credit must cover
PROMISING_ABOVE = 1 / 40  # a shape is promising if its upper bound exceeds the best rate by this share
MAX_PROBE_STEPS = 16  # maximum steps that a promising shape is probed
PROBE_AGE = 128  # steps without results after which any shape is probed, if its credit covers its first rounds


class ShapeProbes:
    """Starts, ends and charges probes. current: the shape that is probed; None without a probe."""

    def __init__(self, acceptance: Acceptance, shapes: RoundShapes) -> None:
        self.current: int | None = None
        self.results_step = 0  # the step from which on the last probe's results are known
        every = range(len(shapes))
        # the shapes whose acceptance each shape's rounds measure
        self._informs = [[other for other in every if acceptance.informs(shape, other)] for shape in every]
        self._last_step = np.full(len(shapes), -PROBE_AGE)  # that measured each shape's acceptance
        self._credit, self._old_credit = FIRST_CREDIT, 0.0
        self._num_steps = self._min_steps = self._max_steps = 0  # steps of the current probe: run, minimum, maximum
        self._is_free = self._is_old = False  # which rule started the probe
        # the first step of a probe only drafts its shape, if a step may verify another shape than it drafts
        self._timed_steps = FIRST_RESULTS + shapes.verifies_last_drafts

    def count_step(self, step: int, shape: int) -> None:
        """Record that step number `step` runs `shape`."""
        self._credit = min(self._credit + PROBING_SHARE, MAX_CREDIT)
        self._old_credit += OLD_SHARE
        self._last_step[self._informs[shape]] = step

    def advance(self, rates: Rates, shape: int, allowed: Sequence[int], step: int) -> None:
        """Charge the current probe with one more round, or end it.

        shape: the shape that runs without a probe.
        allowed: shapes that this step may run.
        """
        probed = self.current
        if probed is None:
            return
        self._num_steps += 1
        may_go_on = (
            self._num_steps < self._max_steps and self._credit > 0.0 and self._is_promising(rates, probed, shape)
        )
        if probed == shape or probed not in allowed or (self._num_steps >= self._min_steps and not may_go_on):
            self.current, self.results_step = None, step + FIRST_RESULTS
        else:
            self._charge(rates.min_loss(probed) / rates.ms[shape])

    def _charge(self, num_rounds: float) -> None:
        if self._is_old:
            self._old_credit -= num_rounds
        elif not self._is_free:
            self._credit -= num_rounds

    def start(
        self, rates: Rates, shape: int, allowed: Sequence[int], load: Load, step_time: StepTime, step: int
    ) -> None:
        """Start a probe if one is due. In this order:

        - A shape that has never run at this batch size is timed at once, because the measured table may be wrong; but
          not beside prompts, where a step does not show the time of a shape's rounds alone.
        - A shape whose time is uncertain is timed if the credit covers that.
        - A promising shape is probed if its credit covers half of its first rounds, until the credit is spent.
        - A shape without recent results is probed if its credit covers its first rounds.
        """
        if step < self.results_step or not step_time.is_settled:
            return
        others = [other for other in allowed if other != shape]
        if not load.with_prompts and self._start_timing(rates, shape, others, len(load.slots), step_time):
            return
        changes = {other: rates.change_loss(other, shape) / rates.ms[shape] for other in others}
        costs = {other: FIRST_RESULTS * rates.loss(other) / rates.ms[shape] + changes[other] for other in others}
        promising = [o for o in others if self._is_promising(rates, o, shape) and self._credit >= PAID_SHARE * costs[o]]
        is_old = not promising
        if is_old and others:
            # the oldest alone, however cheap others are; of equal ones the last, whose rounds tell of the others
            oldest = min(others, key=lambda other: (self._last_step[other], -other))
            is_due = step - self._last_step[oldest] > PROBE_AGE and self._old_credit >= costs[oldest]
            promising = [oldest] if is_due else []
        if promising:
            probed = max(promising, key=rates.upper.__getitem__)
            self._begin(probed, FIRST_RESULTS, 0 if is_old else MAX_PROBE_STEPS)
            self._is_old = is_old
            self._charge(changes[probed] + rates.min_loss(probed) / rates.ms[shape])

    def _start_timing(
        self, rates: Rates, shape: int, others: Sequence[int], num_requests: int, step_time: StepTime
    ) -> bool:
        """Start a probe that measures a shape's time, if one is due. Return whether it did."""
        untimed = [other for other in others if not step_time.has_run(Step(other, num_requests))]
        covered_ms = self._credit * rates.ms[shape]
        uncertain = [
            o for o in others if rates.errors[o] > KNOWN_ERROR and FIRST_RESULTS * rates.min_loss(o) < covered_ms
        ]
        if not untimed and not uncertain:
            return False
        self._begin(rates.best_of(untimed or uncertain), self._timed_steps, 0)
        self._is_free = bool(untimed)
        if uncertain and not untimed:
            self._charge(rates.min_loss(rates.best_of(uncertain)) / rates.ms[shape])
        return True

    def _begin(self, shape: int, min_steps: int, max_steps: int) -> None:
        self.current, self._num_steps, self._min_steps, self._max_steps = shape, 0, min_steps, max_steps
        self._is_free = self._is_old = False

    def _is_promising(self, rates: Rates, probed: int, shape: int) -> bool:
        """Return whether a shape may be the best, and its rounds would tell more than those of `shape`."""
        is_known = probed in self._informs[shape] and rates.errors[probed] <= KNOWN_ERROR
        return not is_known and rates.upper[probed] > (1.0 + PROMISING_ABOVE) * rates.best


__all__ = ["Load", "Reason", "ShapeChoice"]

# Each round adds EVALUATING_SHARE of its time, and IDLE_SHARE of its time beyond BUSY_MS where a device computes it, to
# the host time that evaluations may take, up to EVALUATIONS_AHEAD_MS. FIRST_STEPS have FIRST_EVALUATIONS_MS more.
EVALUATION_MS = 0.45  # one evaluation with cold caches; measured on an H200's host
EVALUATING_SHARE = 1 / 256
IDLE_SHARE = 1 / 32
BUSY_MS = 1.5  # the host's work per round; in longer rounds a device's host is idle
EVALUATE_EVERY = 6  # minimum steps between evaluations while nothing has changed
FIRST_STEPS = 200
FIRST_EVALUATIONS_MS = 32 * EVALUATION_MS
EVALUATIONS_AHEAD_MS = 4 * EVALUATION_MS
EVENTS_MS = 2 * EVALUATION_MS  # kept for changes of the load
LEARN_EVERY_MS = 1.0  # milliseconds of rounds between recorded steps; a record takes 2 us of the host
CHANGE_ABOVE = 1 / 128  # minimum share of time that a better shape must save


class Reason(StrEnum):
    """Why a step has its shape."""

    STATIC = "static"  # no choice: not adaptive, or costs are unknown
    NOT_WANTED = "not_wanted"  # no request speculates
    BEST = "best"  # most tokens per millisecond
    PROMPTS = "prompts"  # the best of the shapes for mixed batches
    SAMPLING = "sampling"  # the best of the shapes captured for every kind of sampling
    TARGET = "target"  # a better shape would exceed the ITL target
    PROBE = "probe"  # to measure its acceptance or time


class ShapeChoice:
    """Chooses each step's tree shape.

    acceptance: estimates of accepted drafts.
    reason: reason for the last choice.
    expected: tokens per millisecond at the last evaluation, by shape name; empty before the first.
    rates: rates of the last evaluation; None before the first.
    preferred: the shape of the last step, or the one replaced by a probe; None before the first choice.
    """

    def __init__(self, shapes: RoundShapes, num_slots: int) -> None:
        self.acceptance = Acceptance(shapes, num_slots)
        self.reason = Reason.STATIC
        self.expected: dict[str, float] = {}
        self.rates: Rates | None = None
        self.preferred: int | None = None
        self._shapes = shapes
        self._current = shapes.default  # runs in every step that supports it
        self._probes = ShapeProbes(self.acceptance, shapes)
        self._step_time: StepTime | None = None
        self._num_requests = 0  # at the last evaluation
        # the last step, and the last with an evaluation and with a change of `_current`
        self._step = self._evaluated_step = self._changed_step = 0
        self._budget_ms = FIRST_EVALUATIONS_MS  # host time that evaluations may take now
        self._lost_rounds = 0.0  # time lost since the current shape stopped being the best, in rounds
        self._unlearnt_ms = 0.0  # time of rounds since the last recorded step

    def max_round_ms(self, num_requests: int) -> float:
        """Upper bound on the milliseconds of a round of any shape, by the last evaluation; 0 without one."""
        growth = max(1.0, num_requests / max(1, self._num_requests))  # since then
        return 0.0 if self.rates is None else growth * max(self.rates.ms)

    def learns_from_step(self, shape: int, has_nats: bool) -> bool:
        """Count a step that verified `shape`. Return whether to report it to `acceptance`: one step per
        `LEARN_EVERY_MS`, and all of probes. has_nats: whether the step's min-entropies are known."""
        if not self._shapes.learns_acceptance or (not shape and not has_nats):
            return False
        if self.rates is not None and shape == self._current:
            self._unlearnt_ms += self.rates.ms[shape]
            if self._unlearnt_ms < LEARN_EVERY_MS:
                return False
        self._unlearnt_ms = 0.0
        return True

    def choose(self, load: Load, step_time: StepTime | None) -> int:
        """Return the index of the shape that the next step drafts; `verified_shape` determines the one that it
        verifies."""
        if not self._shapes.adaptive or step_time is None:
            self.reason = Reason.STATIC
            return self._shapes.default
        if len(load.slots) == 0:  # after a prompt, draft the shape that the first round will verify
            self.reason = Reason.PROMPTS
            return self._current if self._shapes.eager else self._shapes.default
        self._step += 1
        if load.verifies is not None:
            self.acceptance.set_in_flight(load.slots, load.verifies)
        has_new_costs = self._step_time not in (None, step_time)  # no probe starts, and one of other costs ends
        is_evaluated = self._is_evaluation_due(load, step_time)
        if is_evaluated:
            self._evaluate(load, step_time)
        rates = self.rates
        assert rates is not None
        shape, allowed = self._within_limit(load, step_time, rates, *self._without_probe(load, rates))
        self.preferred = shape
        if not load.speculates or has_new_costs:
            self._probes.current = None
        elif self._probes.current is not None:
            self._probes.advance(rates, shape, allowed, self._step)
        elif is_evaluated:
            self._probes.start(rates, shape, allowed, load, step_time, self._step)
        if self._probes.current is not None:
            self.reason, shape = Reason.PROBE, self._probes.current
        self._probes.count_step(self._step, shape)
        return shape

    def _is_evaluation_due(self, load: Load, step_time: StepTime) -> bool:
        """Return whether to evaluate the shapes in this step:

        - With new costs: always.
        - After a change of batch or copied text, or with a probe's results: if the budget is not overdrawn.
        - While another shape seems better, and at the start: after `FIRST_RESULTS` steps.
        - Else after `EVALUATE_EVERY` steps or more, which grow with the time since the last change of shape, unless
          these steps paid for an evaluation.

        The last two need a budget of `EVENTS_MS`, so that some is left for the second.
        """
        if self.rates is None or step_time is not self._step_time:
            return True
        round_ms = self.rates.ms[self._current]
        idle_ms = 0.0 if self._shapes.eager else max(0.0, round_ms - BUSY_MS)
        gained_ms = round_ms * EVALUATING_SHARE + idle_ms * IDLE_SHARE
        self._budget_ms += gained_ms
        if self._step > FIRST_STEPS:
            self._budget_ms = min(self._budget_ms, EVALUATIONS_AHEAD_MS)
        if self._has_changed(load):
            return self._budget_ms >= 0.0
        if self._budget_ms < EVENTS_MS:
            return False
        num_steps = self._step - self._evaluated_step
        if self._lost_rounds > 0.0 or self._step < EVALUATE_EVERY:
            return num_steps >= FIRST_RESULTS
        is_paid = num_steps * gained_ms >= EVALUATION_MS
        is_late = 2 * num_steps >= self._evaluated_step - self._changed_step
        return num_steps >= EVALUATE_EVERY and (is_paid or is_late)

    def _has_changed(self, load: Load) -> bool:
        """Return whether the last evaluation is out of date: the batch has changed by more than a quarter, a probe has
        results, or requests copy more or less of their text."""
        return (
            abs(len(load.slots) - self._num_requests) * 4 > self._num_requests
            or self._evaluated_step < self._probes.results_step <= self._step
            or (self._shapes.model_free and self.acceptance.classes_changed(load.slots))
        )

    def _evaluate(self, load: Load, step_time: StepTime) -> None:
        """Evaluate all shapes, and change the current one if that saves enough."""
        self._budget_ms -= EVALUATION_MS
        self._step_time = step_time
        self.rates = rates = Rates.of(load, self._current, self.acceptance, step_time, self._shapes)
        self.expected = {shape.name: rate for shape, rate in zip(self._shapes.shapes, rates.per_ms, strict=True)}
        best = rates.best_of(range(len(self._shapes)))
        # The change pays once the current shape has lost as much time as it costs. So noise causes no changes.
        saved = (rates.loss(self._current) - rates.loss(best)) / rates.ms[self._current]
        num_steps = min(max(1, self._step - self._evaluated_step), EVALUATE_EVERY)
        self._lost_rounds = max(0.0, self._lost_rounds + num_steps * (saved - CHANGE_ABOVE))
        if self._lost_rounds * rates.ms[self._current] > rates.change_loss(self._current, best):
            self._current, self._lost_rounds, self._changed_step = best, 0.0, self._step
        self._num_requests, self._evaluated_step = len(load.slots), self._step

    def _without_probe(self, load: Load, rates: Rates) -> tuple[int, Sequence[int]]:
        """Return the best of the shapes that this step may run, and these shapes. Mixed batches and rare sampling run
        the shapes that are captured for them."""
        self.reason, allowed = Reason.BEST, tuple(range(len(self._shapes)))
        if load.with_prompts and not self._shapes.eager:
            self.reason = Reason.PROMPTS
            allowed = self._shapes.mixed_shapes(len(load.slots), load.rare_sampling)
        elif load.rare_sampling and not self._shapes.eager:
            self.reason, allowed = Reason.SAMPLING, self._shapes.unrestricted
        return self._current if self._current in allowed else rates.best_of(allowed), allowed

    def _within_limit(
        self, load: Load, step_time: StepTime, rates: Rates, shape: int, allowed: Sequence[int]
    ) -> tuple[int, Sequence[int]]:
        """Restrict the choice to the last shape and those within `Load.limit_ms` with one standard error added."""
        if load.limit_ms == math.inf:
            return shape, allowed
        predicted = [step_time.predict(Step(candidate, len(load.slots), load.kv_tokens)) for candidate in allowed]
        within = [
            candidate
            for candidate, expected in zip(allowed, predicted, strict=True)
            if candidate == self.preferred or expected.ms * math.exp(expected.error) <= load.limit_ms
        ]
        if shape in within or not within:
            return shape, within or allowed
        self.reason = Reason.TARGET
        return self.preferred if self.preferred in within else rates.best_of(within), within
