"""Chooses the tree shape that a step drafts, and verifies if possible: the one with the most tokens per millisecond.

The scheduler calls `choose` once per step and reports accepted drafts; `StepTime` predicts how long steps take. Pure:
time is counted in steps, and equal calls have equal results.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.acceptance.match_survival import MatchSurvival
from aerie.workers.scheduling.acceptance.survival import Floats, Ints, Survival
from aerie.workers.scheduling.shape_probes import FIRST_RESULTS, ShapeProbes
from aerie.workers.scheduling.shape_rates import Load, Rates, Reason
from aerie.workers.scheduling.timing.step import Step
from aerie.workers.scheduling.timing.step_time import StepTime

__all__ = ["Load", "Reason", "ShapeChoice"]

# steps between evaluations: EVALUATE_EVERY after a change of shape, then longer by EVALUATE_LATER each time, up to the
# larger of EVALUATE_EVERY and EVALUATE_EVERY_MS of rounds
EVALUATE_EVERY = 8
EVALUATE_LATER = 1.5
EVALUATE_EVERY_MS = 64.0
CHANGING_EVERY_MS = 16.0  # the limit while another shape seems better, a probe runs, or the batch has changed
# Each round adds EVALUATING_SHARE of its time, and IDLE_SHARE of its time beyond BUSY_MS, to the host time that
# evaluations may take. It starts at FIRST_EVALUATIONS_MS, and after FIRST_EVALUATED steps is at most
# EVALUATIONS_AHEAD_MS.
EVALUATION_MS = 0.45  # one evaluation with cold caches; measured on an H200's host
EVALUATING_SHARE = 1 / 256
IDLE_SHARE = 1 / 32
BUSY_MS = 1.5  # the host's work per round; in longer rounds a GPU's host is idle
FIRST_EVALUATED = 200
FIRST_EVALUATIONS_MS = 12 * EVALUATION_MS
EVALUATIONS_AHEAD_MS = 4 * EVALUATION_MS
LEARN_EVERY_MS = 1.0  # milliseconds of rounds between recorded steps; a record takes 2 us of the host
FIRST_RECORDS = 32  # number of first steps, which are all recorded
CHANGE_ABOVE = 1 / 128  # minimum share of time that a better shape must save
PROMPTS_WEIGHT = 1 / 32  # weight of the newest step in the estimated probability of prompt chunks
FIRST_PROMPT_PROBABILITY = 1 / 8  # initial value of that probability


class ShapeChoice:
    """Chooses each step's tree shape.

    reason: reason for the last choice.
    expected: tokens per millisecond at the last evaluation, by shape name; empty before the first.
    rates: rates of the last evaluation; None before the first.
    usual: the shape of the last step, or the one replaced by a probe; None before the first choice.
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
        self._current = shapes.default  # runs in every step that supports it
        self._beside: int | None = None  # runs in mixed batches, and between frequent mixed batches
        self._prompt_probability = FIRST_PROMPT_PROBABILITY  # that chunks follow a step without
        self._had_prompts = True
        self.rates: Rates | None = None
        self._step_time: StepTime | None = None
        self._num_requests = 0
        self._until_evaluation = 0
        self._step = 0
        self._evaluated = self._timed = 0  # the last step with an evaluation, and with one that predicted times
        self._evaluations_ms = FIRST_EVALUATIONS_MS  # host time that evaluations may take now
        self._interval = float(EVALUATE_EVERY)  # steps between evaluations
        self._lost = 0.0  # time lost since the current shape stopped being the best, in rounds
        self._unlearnt_ms = 0.0
        self._num_learnt = 0
        self._num_plain = 0  # rounds without drafts since the last evaluation
        self._probes = ShapeProbes(self._acceptance, shapes)

    def max_round_ms(self, num_requests: int) -> float:
        """Upper bound on the milliseconds of a round of any shape, by the last evaluation; 0 without one."""
        growth = max(1.0, num_requests / max(1, self._num_requests))  # since then
        return 0.0 if self.rates is None else growth * max(self.rates.ms)

    def count_step(self, shape: int, has_nats: bool) -> bool:
        """Count a step that verified `shape`. Return whether to report it to `record`: one step per `LEARN_EVERY_MS`,
        all of the first ones, and all of probes. has_nats: whether the step's min-entropies are known."""
        if not self._shapes.learns_acceptance or (not shape and not has_nats):
            return False
        if self.rates is not None and shape == self._current:
            self._unlearnt_ms += self.rates.ms[shape]
            if self._unlearnt_ms < LEARN_EVERY_MS and self._num_learnt >= FIRST_RECORDS:
                return False
        self._unlearnt_ms = 0.0
        self._num_learnt += 1
        return True

    def record(
        self,
        slots: Ints,
        numbers: Ints,
        drafted: Ints,
        shape: int,
        accepted: npt.NDArray[np.int32],
        nats: Floats | None = None,
    ) -> None:
        """Report a step's rounds; see `Survival.record` and, for `nats`, `Survival.record_entropies`."""
        if nats is not None:
            self.survival.record_entropies(slots, numbers, shape, nats)
        if shape:
            self.survival.record(slots, numbers, drafted, shape, accepted)

    def match_classes(self, slots: Ints, numbers: Ints) -> Ints | None:
        """See `MatchSurvival.classes`; None in engines that do not copy drafts."""
        return None if self._matches is None else self._matches.classes(slots, numbers)

    def observe(
        self, slots: Ints, numbers: Ints, classes: Ints, counts: npt.NDArray[np.int32], matches: npt.NDArray[np.int32]
    ) -> None:
        """See `MatchSurvival.observe`."""
        if self._matches is not None and len(slots):
            self._matches.observe(slots, numbers, classes, counts, matches)

    def choose(self, load: Load, step_time: StepTime | None) -> int:
        """Return the index of the shape that the next step drafts; `verified_shape` determines the one that it
        verifies."""
        num_requests = len(load.slots)
        if not self._shapes.adaptive or step_time is None:
            self.reason = Reason.STATIC
            return self._shapes.default
        if not self._had_prompts:
            self._prompt_probability += PROMPTS_WEIGHT * (load.with_prompts - self._prompt_probability)
        self._had_prompts = load.with_prompts
        if num_requests == 0:  # after a prompt, draft the shape that the first round will verify
            self.reason = Reason.PROMPTS
            if self._shapes.eager:
                return self._current
            self._beside = self._shapes.default
            return self._beside
        self._step += 1
        self._until_evaluation -= 1
        if self._matches is not None and load.verifies is not None:
            self._matches.set_in_flight(load.slots, load.verifies)
        is_evaluated = self._is_evaluation_due(load, step_time)
        if is_evaluated:
            self._timed = self._timed if step_time is self._step_time else -EVALUATE_EVERY
            self._step_time = step_time
            self._evaluate(load, step_time)
        rates = self.rates
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
        """Return whether to evaluate the shapes now. Evaluations are frequent at the start and after a change, when
        estimates change fast. Their share of the host's time is bounded."""
        num_requests = len(load.slots)
        if self.rates is None or step_time is not self._step_time:
            return True
        if self._matches is not None and self._matches.classes_changed(load.slots):
            return True
        round_ms = self.rates.ms[self._current]
        idle_ms = 0.0 if self._shapes.eager else max(0.0, round_ms - BUSY_MS)
        self._evaluations_ms += round_ms * EVALUATING_SHARE + idle_ms * IDLE_SHARE
        if self._evaluations_ms < 0.0:
            return False
        if self._until_evaluation <= 0:
            return True
        batch_changed = abs(num_requests - self._num_requests) * 4 > self._num_requests
        return batch_changed and self._step - self._evaluated >= CHANGING_EVERY_MS / round_ms

    def _evaluate(self, load: Load, step_time: StepTime) -> None:
        """Evaluate all shapes, and change the current one if that saves enough. The best shape has the smallest loss,
        also in mixed batches, because a chunk adds the same time to rounds of any shape."""
        self._evaluations_ms -= EVALUATION_MS
        if self._step > FIRST_EVALUATED:
            self._evaluations_ms = min(self._evaluations_ms, EVALUATIONS_AHEAD_MS)
        self._acceptance.age(self._num_plain)
        self._num_plain = 0
        # copied texts change too often to predict all times again
        keeps_times = self._matches is not None and self._probes.is_idle and len(load.slots) == self._num_requests
        timed = self.rates if keeps_times and self._step - self._timed < EVALUATE_EVERY else None
        self._timed = self._step if timed is None else self._timed
        self.rates = rates = Rates.of(load, self._current, self._acceptance, step_time, self._shapes, timed)
        self._probes.charge(rates, self._current, self._step)
        self.expected = {
            shape.name: count / ms for shape, count, ms in zip(self._shapes.shapes, rates.tokens, rates.ms, strict=True)
        }
        best = rates.min_loss_shape(self._all)
        if self._has_lost_enough(rates, best):
            self._current, self._lost, self._interval = best, 0.0, float(EVALUATE_EVERY)
            self._timed = -EVALUATE_EVERY  # errors are relative to the current shape
        self._num_requests, self._evaluated = len(load.slots), self._step
        round_ms = rates.ms[self._current]
        if self._step < EVALUATE_EVERY:
            self._until_evaluation = FIRST_RESULTS
            return
        max_steps = _steps_between(round_ms)
        if self._lost or self._probes.current is not None:
            max_steps = max(1, int(CHANGING_EVERY_MS / round_ms))
        self._interval = min(self._interval * EVALUATE_LATER, max_steps)
        self._until_evaluation = int(self._interval)

    def _has_lost_enough(self, rates: Rates, best: int) -> bool:
        """Return whether to change to the best shape: if the current one has lost as much time as the change costs. So
        noise in the estimates causes no changes."""
        round_ms = rates.ms[self._current]
        saved = (rates.loss(self._current) - rates.loss(best)) / round_ms
        num_steps = max(1, min(self._step - self._evaluated, _steps_between(round_ms)))
        self._lost = max(0.0, self._lost + num_steps * (saved - CHANGE_ABOVE))
        return self._lost * round_ms > rates.change_loss(self._current, best)

    def _without_probe(self, load: Load, rates: Rates) -> tuple[int, Sequence[int]]:
        """Return the best of the shapes that this step may run, and these shapes.

        Mixed batches may run the shapes that are captured with chunks. The steps between two mixed batches keep their
        shape if changing to the current shape and back would cost more than it saves.
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
            steps_left = 1.0 / max(self._prompt_probability, 1e-9)
            lost_ms = steps_left * (rates.loss(self._beside) - rates.loss(self._current))
            if lost_ms < rates.change_loss(self._beside, self._current):
                self.reason = Reason.PROMPTS
                return self._beside, (self._beside,)
            self._beside = None
        return self._current, self._all

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
        return self.usual if self.usual in within else rates.min_loss_shape(within), within

    def _best_of(self, allowed: Sequence[int], rates: Rates) -> int:
        return self._current if self._current in allowed else rates.min_loss_shape(allowed)

    def _with_probe(
        self,
        load: Load,
        step_time: StepTime,
        rates: Rates,
        shape: int,
        allowed: Sequence[int],
        is_evaluated: bool,
    ) -> int:
        """Return this step's shape: `shape`, or the probe's. A probe's first round verifies drafts of the previous
        shape, or none."""
        probes = self._probes
        if probes.current is not None:
            if probes.advance(rates, shape, allowed, self._step):
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
    """Maximum steps between two evaluations while nothing changes."""
    return max(EVALUATE_EVERY, int(EVALUATE_EVERY_MS / round_ms))
