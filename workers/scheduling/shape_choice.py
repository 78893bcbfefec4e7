"""Chooses the tree shape that a step verifies and drafts: the one with the most expected tokens per millisecond.

The scheduler asks once a step and reports what rounds accepted; `StepTime` says how long steps take. The plan tells the
ranks. Pure: steps are the clock, and equal calls give equal answers.
"""

import math
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from workers.config import RoundShapes
from workers.scheduling.acceptance.match_survival import MatchSurvival
from workers.scheduling.acceptance.survival import Floats, Ints, Survival
from workers.scheduling.shape_probes import FIRST_RESULTS, ShapeProbes
from workers.scheduling.shape_rates import Load, Rates
from workers.scheduling.step_time import Step, StepTime

__all__ = ["Load", "Reason", "ShapeChoice"]

EVALUATE_EVERY = 8  # steps; estimates hardly move in fewer
EVALUATE_EVERY_MS = 64.0  # milliseconds of rounds between evaluations, if steps are faster
EVALUATION_MS = 0.45  # host time of one evaluation, whose code has left the caches; an H200's host
EVALUATING_SHARE = 1 / 256  # share of the time for evaluations where rounds wait for the host,
IDLE_SHARE = 1 / 32  # and of the time of a round beyond BUSY_MS
BUSY_MS = 1.5  # host time of a round: a longer one leaves the host idle
FIRST_EVALUATED = 200  # steps
FIRST_EVALUATIONS_MS = 12 * EVALUATION_MS  # evaluation time of the first rounds
EVALUATIONS_AHEAD_MS = 4 * EVALUATION_MS  # evaluation time that may be spent in advance later
EVALUATE_LATER = 1.5  # growth of the steps between evaluations after a change of shape, up to the limits above
CHANGING_EVERY_MS = 16.0  # instead, while another shape seems better, a probe runs or the batch has changed
LEARN_EVERY_MS = 1.0  # milliseconds of rounds between records: each takes 2 microseconds of the host
FIRST_RECORDS = 32  # first steps, which are all recorded
CHANGE_ABOVE = 1 / 128  # share of the time that a better shape must save
PROMPTS_WEIGHT = 1 / 32  # weight of a step in the estimated chance that prompt chunks come again
FIRST_RETURN = 1 / 8  # that chance before any step


class Reason(StrEnum):
    """Why a step has its shape."""

    STATIC = "static"  # no choice: not adaptive, or no costs are known
    NOBODY = "nobody"  # no request wants drafts
    BEST = "best"  # most tokens per millisecond
    PROMPTS = "prompts"  # the best of those that run beside prompt chunks
    SAMPLING = "sampling"  # the best of those that are captured for every kind of sampling
    TARGET = "target"  # a better one would exceed the ITL target
    PROBE = "probe"  # to learn what it would accept, or how long it takes


class ShapeChoice:
    """reason: of the last choice.
    expected: tokens per millisecond at the last evaluation, by shape name; empty while nothing is known.
    usual: shape of the last step, or that it would have had without a probe; None without a choice.
    """

    def __init__(self, shapes: RoundShapes, num_slots: int) -> None:
        self.survival = Survival(shapes, num_slots)
        self._matches = MatchSurvival(shapes, num_slots) if shapes.model_free else None
        self._acceptance = self._matches or self.survival
        self.reason = Reason.STATIC
        self.expected: dict[str, float] = {}
        self.usual: int | None = None
        self._shapes = shapes
        self._all = tuple(range(len(shapes)))
        self._current = shapes.default  # runs unless a step may not have it
        self._beside: int | None = None  # runs beside prompt chunks and, if they come again soon, between them
        self._chunks_return = FIRST_RETURN  # chance that a step after one without prompt chunks has some
        self._had_prompts = True
        self._rates: Rates | None = None
        self._step_time: StepTime | None = None
        self._num_requests = 0
        self._until_evaluation = 0
        self._step = 0
        self._evaluated = 0  # the last step with an evaluation
        self._evaluations_ms = FIRST_EVALUATIONS_MS  # that evaluations may take now
        self._interval = float(EVALUATE_EVERY)  # steps between evaluations
        self._lost = 0.0  # time lost since the current shape is not the best, in rounds
        self._unlearnt_ms = 0.0
        self._num_learnt = 0
        self._num_plain = 0  # rounds without drafts since the last evaluation
        self._probes = ShapeProbes(self._acceptance, len(shapes))

    def max_round_ms(self, num_requests: int) -> float:
        """Upper bound on the milliseconds of a round of any shape, by the last evaluation; 0 without one."""
        growth = max(1.0, num_requests / max(1, self._num_requests))  # since then
        return 0.0 if self._rates is None else growth * max(self._rates.ms)

    def record(
        self,
        slots: Ints,
        users: Ints,
        drafted: Ints,
        shape: int,
        accepted: npt.NDArray[np.int32],
        nats: Floats | None = None,
    ) -> None:
        """See `Survival.record`, and for nats `Survival.record_entropies`. The first rounds and those of probes are all
        learnt from, others every `LEARN_EVERY_MS`."""
        if not self._shapes.learns_acceptance or (not shape and nats is None):
            return
        if self._rates is not None and shape == self._current:
            self._unlearnt_ms += self._rates.ms[shape]
            if self._unlearnt_ms < LEARN_EVERY_MS and self._num_learnt >= FIRST_RECORDS:
                return
        self._unlearnt_ms = 0.0
        self._num_learnt += 1
        if nats is not None:
            self.survival.record_entropies(slots, users, shape, nats)
        if shape:
            self.survival.record(slots, users, drafted, shape, accepted)

    def match_classes(self, slots: Ints, users: Ints) -> Ints | None:
        """See `MatchSurvival.classes`; None where drafts are not copied."""
        return None if self._matches is None else self._matches.classes(slots, users)

    def observe(
        self, slots: Ints, users: Ints, classes: Ints, counts: npt.NDArray[np.int32], matches: npt.NDArray[np.int32]
    ) -> None:
        """See `MatchSurvival.observe`."""
        if self._matches is not None and len(slots):
            self._matches.observe(slots, users, classes, counts, matches)

    def choose(self, load: Load, step_time: StepTime | None) -> int:
        """The index of the shape that the next step verifies and drafts."""
        num_requests = len(load.slots)
        if not self._shapes.adaptive or step_time is None:
            self.reason = Reason.STATIC
            return self._shapes.default
        if not self._had_prompts:
            self._chunks_return += PROMPTS_WEIGHT * (load.with_prompts - self._chunks_return)
        self._had_prompts = load.with_prompts
        if num_requests == 0:  # prompts alone draft what their requests' first rounds will verify
            self.reason = Reason.PROMPTS
            if self._shapes.eager:
                return self._current
            self._beside = self._shapes.default
            return self._beside
        self._step += 1
        self._until_evaluation -= 1
        is_evaluated = self._is_evaluation_due(load, step_time)
        if is_evaluated:
            self._step_time = step_time
            self._evaluate(load, step_time)
        rates = self._rates
        assert rates is not None
        shape, allowed = self._within_limit(load, step_time, rates, *self._without_probe(load, rates))
        self.usual = shape
        if not load.speculates:
            self._probes.current = None
        elif is_evaluated or self._probes.current is not None:
            shape = self._with_probe(load, step_time, rates, shape, allowed, is_evaluated)
        self._probes.count_step(self._step, shape)
        if shape == 0:
            self._num_plain += num_requests
        return shape

    def _is_evaluation_due(self, load: Load, step_time: StepTime) -> bool:
        """Whether to evaluate the shapes now. Evaluations are frequent at first and after a change, because first
        results change much; their share of the host's time is bounded."""
        num_requests = len(load.slots)
        if self._rates is None or step_time is not self._step_time:
            return True
        if self._matches is not None and self._matches.has_moved(load.slots):
            return True
        round_ms = self._rates.ms[self._current]
        self._evaluations_ms += round_ms * EVALUATING_SHARE + max(0.0, round_ms - BUSY_MS) * IDLE_SHARE
        if self._evaluations_ms < 0.0:
            return False
        if self._until_evaluation <= 0:
            return True
        has_moved = abs(num_requests - self._num_requests) * 4 > self._num_requests
        return has_moved and self._step - self._evaluated >= CHANGING_EVERY_MS / round_ms

    def _evaluate(self, load: Load, step_time: StepTime) -> None:
        """Estimate all shapes anew, and change the current one if that saves enough. The best shape is the one that
        loses least, also beside prompt chunks, because a chunk adds the same time to rounds of any shape."""
        self._evaluations_ms -= EVALUATION_MS
        if self._step > FIRST_EVALUATED:
            self._evaluations_ms = min(self._evaluations_ms, EVALUATIONS_AHEAD_MS)
        self._acceptance.age(self._num_plain)
        self._num_plain = 0
        self._rates = rates = Rates.of(load, self._current, self._acceptance, step_time, self._shapes.model_free)
        self._probes.charge(rates, self._current, self._step)
        self.expected = {
            shape.name: count / ms for shape, count, ms in zip(self._shapes.shapes, rates.tokens, rates.ms, strict=True)
        }
        best = rates.least_loss(self._all)
        if self._has_lost_enough(rates, best):
            self._current, self._lost, self._interval = best, 0.0, float(EVALUATE_EVERY)
        self._num_requests, self._evaluated = len(load.slots), self._step
        round_ms = rates.ms[self._current]
        if self._step < EVALUATE_EVERY:
            self._until_evaluation = FIRST_RESULTS
            return
        most = _steps_between(round_ms)
        if self._lost or self._probes.current is not None:
            most = max(1, int(CHANGING_EVERY_MS / round_ms))
        self._interval = min(self._interval * EVALUATE_LATER, most)
        self._until_evaluation = int(self._interval)

    def _has_lost_enough(self, rates: Rates, best: int) -> bool:
        """Whether to change to the best shape: once rounds of the current one have lost as much time as the change
        costs. So noise in the estimates causes no changes."""
        round_ms = rates.ms[self._current]
        saved = (rates.loss(self._current) - rates.loss(best)) / round_ms
        num_steps = max(1, min(self._step - self._evaluated, _steps_between(round_ms)))
        self._lost = max(0.0, self._lost + num_steps * (saved - CHANGE_ABOVE))
        return self._lost * round_ms > rates.change_loss(self._current, best)

    def _without_probe(self, load: Load, rates: Rates) -> tuple[int, Sequence[int]]:
        """The best shape of those that this step may run, and these.

        A step with prompt chunks may run the shapes that are captured there. Steps between chunks go on with the shape
        of the last one if the change to the current shape and back would cost more than these steps lose.
        """
        num_requests, is_restricted = len(load.slots), load.with_prompts and not self._shapes.eager
        if is_restricted:
            allowed: Sequence[int] = self._shapes.beside_chunks(num_requests, load.rare_sampling)
            self._beside = self._best_of(allowed, rates)
            self.reason = Reason.PROMPTS
            return self._beside, allowed
        if load.rare_sampling and not self._shapes.eager:
            self._beside, allowed = None, self._shapes.unrestricted
            self.reason = Reason.SAMPLING
            return self._best_of(allowed, rates), allowed
        self.reason = Reason.BEST
        if self._beside is not None and self._beside != self._current:
            steps_left = 1.0 / max(self._chunks_return, 1e-9)
            lost_ms = steps_left * (rates.loss(self._beside) - rates.loss(self._current))
            if lost_ms < rates.change_loss(self._beside, self._current):
                self.reason = Reason.PROMPTS
                return self._beside, (self._beside,)
            self._beside = None
        return self._current, self._all

    def _within_limit(
        self, load: Load, step_time: StepTime, rates: Rates, shape: int, allowed: Sequence[int]
    ) -> tuple[int, Sequence[int]]:
        """Restrict the choice to the last shape and those within `Load.limit_ms`, one standard error later."""
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
        return self.usual if self.usual in within else rates.least_loss(within), within

    def _best_of(self, allowed: Sequence[int], rates: Rates) -> int:
        return self._current if self._current in allowed else rates.least_loss(allowed)

    def _with_probe(
        self,
        load: Load,
        step_time: StepTime,
        rates: Rates,
        shape: int,
        allowed: Sequence[int],
        is_evaluated: bool,
    ) -> int:
        """Return the shape of this step: `shape`, or a probe's. The first round of a probe still verifies what the
        former shape drafted, or nothing."""
        probes = self._probes
        if probes.current is not None:
            if probes.go_on(rates, shape, allowed, self._step):
                self._until_evaluation = min(self._until_evaluation, FIRST_RESULTS)
        elif is_evaluated and probes.begin(
            rates, shape, allowed, len(load.slots), step_time, self._step, load.with_prompts and not self._shapes.eager
        ):
            self._until_evaluation = min(self._until_evaluation, FIRST_RESULTS)
        if probes.current is None:
            return shape
        self.reason = Reason.PROBE
        return probes.current.shape


def _steps_between(round_ms: float) -> int:
    """Steps between two evaluations while nothing changes."""
    return max(EVALUATE_EVERY, int(EVALUATE_EVERY_MS / round_ms))
