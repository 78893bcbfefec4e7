"""Probes: steps of a shape that is not the best by what is known, to learn its acceptance or its time.

`workers.scheduling.shape_choice` asks once a step whether to probe. Pure: steps are the clock. What probes may cost is
a share of the time that rounds take, so that no shape is out of reach for ever and none costs much.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workers.scheduling.shape_rates import Acceptance, Rates, shapes_told_by
from workers.scheduling.step_time import Step, StepTime

FIRST_RESULTS = 3  # steps until the first results of a shape have been read
PROBING_SHARE = 1 / 150  # share of the time for probes of promising shapes
OLD_SHARE = 1 / 500  # share of the time for probes of shapes without recent results
FIRST_ROUNDS = 3  # rounds whose time probes may cost in advance
PAID_SHARE = 1 / 2  # share of a probe's first rounds that must have been saved for
PROBE_AGE = 128  # steps without results after which a shape is probed again
MAX_ROUNDS = 6.0  # rounds whose time probes may cost after a long time without any
MAX_PROBE_STEPS = 16  # longest probe of a shape that stays promising
TIMED_STEPS = 2  # steps that tell how long a shape takes
FREE_PROBES = 3  # timing probes that are not charged, per shape and batch size


@dataclass
class Probe:
    """One probe.

    least: steps that it runs at least.
    most: steps that it runs at most; in between it ends once its shape is not promising.
    steps: so far.
    is_old: it began because the shape had no recent results.
    is_free: it is not charged, because the shape has hardly run at this batch size.
    budget: rounds whose time it may cost; it ends once that is spent.
    """

    shape: int
    least: int
    most: int
    steps: int = 1
    is_old: bool = False
    is_free: bool = False
    budget: float = math.inf


class ShapeProbes:
    """current: the probe that runs, if any."""

    def __init__(self, survival: Acceptance, num_shapes: int) -> None:
        self.current: Probe | None = None
        self._told = shapes_told_by(survival, num_shapes)
        # last step that taught about each shape, without the last ones, which all ran the same shape
        self._informed = np.full(num_shapes, -PROBE_AGE, np.int64)
        self._last_step, self._last_shape = -PROBE_AGE, 0
        # time that probes may cost now, in rounds; below 0 after a probe that cost more
        self._credit = self._old_credit = 0.0
        self._num_pace_changes = 0
        self._num_free: Counter[tuple[int, int]] = Counter()  # probes, by shape and logarithm of the batch size
        self._ended: deque[tuple[int, Probe]] = deque()  # with the step at which each is charged

    def count_step(self, step: int, shape: int) -> None:
        """Step number `step` runs `shape`."""
        self._credit = min(self._credit + PROBING_SHARE, MAX_ROUNDS)
        self._old_credit += OLD_SHARE
        if shape != self._last_shape:
            self._inform()
        self._last_step, self._last_shape = step, shape

    def _inform(self) -> None:
        self._informed[self._told[self._last_shape]] = self._last_step

    def go_on(self, rates: Rates, shape: int, allowed: Sequence[int], step: int) -> bool:
        """Continue or end the current probe; returns whether it has just ended.

        shape: runs if no probe does.
        allowed: shapes that this step may run.
        """
        probe = self.current
        if probe is None:
            return False
        if probe.shape == shape:
            self.current = None  # it has become the best
            return False
        is_spent = probe.steps * rates.certain_loss(probe.shape) >= probe.budget * rates.ms[shape]
        is_over = probe.steps >= probe.least and (is_spent or not rates.is_promising(probe.shape))
        if is_over or probe.steps >= probe.most or probe.shape not in allowed:
            return self.end(step)
        probe.steps += 1
        return False

    def end(self, step: int) -> bool:
        """End the current probe; returns whether there was one. It is charged once its last results have been read,
        because they say how long its rounds took."""
        if self.current is None:
            return False
        self._ended.append((step + FIRST_RESULTS, self.current))
        self.current = None
        return True

    def charge(self, rates: Rates, shape: int, step: int) -> None:
        """Charge ended probes with what they have cost. shape: that runs otherwise."""
        while self._ended and self._ended[0][0] <= step:
            probe = self._ended.popleft()[1]
            lost_ms = probe.steps * rates.certain_loss(probe.shape) + rates.change_loss(probe.shape, shape)
            lost = lost_ms / rates.ms[shape]
            if probe.is_old:
                self._old_credit -= lost
            elif not probe.is_free:
                self._credit -= lost

    def begin(
        self,
        rates: Rates,
        shape: int,
        allowed: Sequence[int],
        num_requests: int,
        step_time: StepTime,
        step: int,
        with_prompts: bool,
    ) -> bool:
        """Begin a probe if one is due; returns whether it did.

        - A shape that has never run at this batch size is timed at once: nothing else tells how wrong the table is. So
          is one that has hardly run and may still be the best.
        - A shape whose time is uncertain is probed once former probes are paid for.
        - A promising shape is probed once it can be paid for, and only for so long: else one probe of a tree takes what
          the next thousand steps may spend.
        - A shape without recent results is probed once the cost is saved up.

        Steps with prompt chunks (`with_prompts`) tell nothing about the time of a shape's rounds.
        """
        if self._ended or not step_time.is_settled:
            return False
        if step_time.num_pace_changes != self._num_pace_changes:  # what was learnt and charged before may be wrong
            self._num_pace_changes, self._credit = step_time.num_pace_changes, max(self._credit, 0.0)
        others = [other for other in allowed if other != shape]
        round_ms = rates.ms[shape]
        left_ms = (self._credit + FIRST_ROUNDS) * round_ms
        if not with_prompts and (timed := self._to_time(rates, others, num_requests, step_time, left_ms)):
            self.current = timed
            return True
        promising = [other for other in others if rates.is_promising(other) and self._can_pay(rates, other, left_ms)]
        if promising:
            best = max(promising, key=rates.hoped.__getitem__)
            budget = math.inf if rates.changes_are_free else left_ms / round_ms
            self.current = Probe(best, FIRST_RESULTS, MAX_PROBE_STEPS, budget=budget)
            return True
        self._inform()
        old = [other for other in others if step - self._informed[other] > PROBE_AGE]
        if old:
            oldest = min(old, key=self._informed.__getitem__)
            lost_ms = FIRST_RESULTS * rates.loss(oldest) + rates.change_loss(oldest, shape)
            if lost_ms <= self._old_credit * round_ms:
                self.current = Probe(oldest, FIRST_RESULTS, MAX_PROBE_STEPS, is_old=True, budget=self._old_credit)
                return True
        return False

    def _can_pay(self, rates: Rates, shape: int, left_ms: float) -> bool:
        """Whether former probes are paid for and, unless every round tells of all shapes, `PAID_SHARE` of this one's
        first rounds are saved for, or as much as ever is."""
        if rates.changes_are_free or self._credit >= MAX_ROUNDS:
            return left_ms > 0.0
        return PAID_SHARE * FIRST_RESULTS * rates.certain_loss(shape) < left_ms

    def _to_time(
        self, rates: Rates, others: Sequence[int], num_requests: int, step_time: StepTime, left_ms: float
    ) -> Probe | None:
        """A probe that tells how long a shape takes, if one is due."""
        batch = (num_requests - 1).bit_length()

        def is_free(shape: int) -> bool:
            has_run = step_time.has_run(Step(shape, num_requests))
            is_left = self._num_free[shape, batch] < FREE_PROBES
            return not has_run or (is_left and rates.is_vague(shape) and rates.is_possible(shape))

        free = [other for other in others if is_free(other)]
        if free:
            shape = rates.least_loss(free)
            self._num_free[shape, batch] += 1
            return Probe(shape, TIMED_STEPS, TIMED_STEPS, is_free=True)
        vague = [o for o in others if rates.is_vague(o) and TIMED_STEPS * rates.certain_loss(o) < left_ms]
        return Probe(rates.least_loss(vague), TIMED_STEPS, TIMED_STEPS) if vague else None
