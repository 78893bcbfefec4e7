"""Chooses the tree shape that a step drafts, and verifies if possible: the one with the most tokens per millisecond.

The scheduler calls `choose` once per step and reports accepted drafts to `acceptance`; `StepTime` predicts how long
steps take. Pure: time is counted in steps, and equal calls have equal results.
"""

import math
from collections.abc import Sequence
from enum import StrEnum

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.shapes.acceptance import Acceptance
from aerie.workers.scheduling.shapes.shape_probes import FIRST_RESULTS, ShapeProbes
from aerie.workers.scheduling.shapes.shape_rates import Load, Rates
from aerie.workers.scheduling.timing.step import Step
from aerie.workers.scheduling.timing.step_time import StepTime

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
    usual: the shape of the last step, or the one replaced by a probe; None before the first choice.
    """

    def __init__(self, shapes: RoundShapes, num_slots: int) -> None:
        self.acceptance = Acceptance(shapes, num_slots)
        self.reason = Reason.STATIC
        self.expected: dict[str, float] = {}
        self.rates: Rates | None = None
        self.usual: int | None = None
        self._shapes = shapes
        self._current = shapes.default  # runs in every step that supports it
        self._probes = ShapeProbes(self.acceptance, shapes)
        self._step_time: StepTime | None = None
        self._num_requests = 0  # at the last evaluation
        # the last step, and the last with an evaluation and with a change of `_current`
        self._step = self._evaluated = self._changed = 0
        self._evaluations_ms = FIRST_EVALUATIONS_MS  # host time that evaluations may take now
        self._lost = 0.0  # time lost since the current shape stopped being the best, in rounds
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
        self.usual = shape
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
        """Return whether to evaluate the shapes now. `EVENTS_MS` of the host's time is kept for steps after a
        change of batch or copied text, or with a probe's results."""
        if self.rates is None or step_time is not self._step_time:
            return True
        round_ms = self.rates.ms[self._current]
        idle_ms = 0.0 if self._shapes.eager else max(0.0, round_ms - BUSY_MS)
        gained_ms = round_ms * EVALUATING_SHARE + idle_ms * IDLE_SHARE
        self._evaluations_ms += gained_ms
        if self._step > FIRST_STEPS:
            self._evaluations_ms = min(self._evaluations_ms, EVALUATIONS_AHEAD_MS)
        has_changed = (
            abs(len(load.slots) - self._num_requests) * 4 > self._num_requests
            or self._evaluated < self._probes.results_step <= self._step
            or (self._shapes.model_free and self.acceptance.classes_changed(load.slots))
        )
        if has_changed:
            return self._evaluations_ms >= 0.0
        num_steps, is_soon = self._step - self._evaluated, self._lost > 0.0 or self._step < EVALUATE_EVERY
        if num_steps < (FIRST_RESULTS if is_soon else EVALUATE_EVERY) or self._evaluations_ms < EVENTS_MS:
            return False
        # later and later after a change of shape, unless the host has time
        has_time = num_steps * gained_ms >= EVALUATION_MS
        return is_soon or has_time or 2 * num_steps >= self._evaluated - self._changed

    def _evaluate(self, load: Load, step_time: StepTime) -> None:
        """Evaluate all shapes, and change the current one if that saves enough."""
        self._evaluations_ms -= EVALUATION_MS
        self._step_time = step_time
        self.rates = rates = Rates.of(load, self._current, self.acceptance, step_time, self._shapes)
        self.expected = {shape.name: rate for shape, rate in zip(self._shapes.shapes, rates.per_ms, strict=True)}
        best = rates.best_of(range(len(self._shapes)))
        # The change pays once the current shape has lost as much time as it costs. So noise causes no changes.
        saved = (rates.loss(self._current) - rates.loss(best)) / rates.ms[self._current]
        num_steps = min(max(1, self._step - self._evaluated), EVALUATE_EVERY)
        self._lost = max(0.0, self._lost + num_steps * (saved - CHANGE_ABOVE))
        if self._lost * rates.ms[self._current] > rates.change_loss(self._current, best):
            self._current, self._lost, self._changed = best, 0.0, self._step
        self._num_requests, self._evaluated = len(load.slots), self._step

    def _without_probe(self, load: Load, rates: Rates) -> tuple[int, Sequence[int]]:
        """Return the best of the shapes that this step may run, and these shapes. Mixed batches and rare sampling run
        the shapes that are captured for them."""
        self.reason, allowed = Reason.BEST, tuple(range(len(self._shapes)))
        if load.with_prompts and not self._shapes.eager:
            self.reason = Reason.PROMPTS
            allowed = self._shapes.beside_chunks(len(load.slots), load.rare_sampling)
        elif load.rare_sampling and not self._shapes.eager:
            self.reason, allowed = Reason.SAMPLING, self._shapes.unrestricted
        return self._current if self._current in allowed else rates.best_of(allowed), allowed

    def _within_limit(
        self, load: Load, step_time: StepTime, rates: Rates, shape: int, allowed: Sequence[int]
    ) -> tuple[int, Sequence[int]]:
        """Restrict the choice to the last shape and those within `Load.limit_ms` with one standard error added."""
        if load.limit_ms == math.inf:
            return shape, allowed
        found = [step_time.predict(Step(each, len(load.slots), load.kv_tokens)) for each in allowed]
        within = [
            each
            for each, expected in zip(allowed, found, strict=True)
            if each == self.usual or expected.ms * math.exp(expected.error) <= load.limit_ms
        ]
        if shape in within or not within:
            return shape, within or allowed
        self.reason = Reason.TARGET
        return self.usual if self.usual in within else rates.best_of(within), within
