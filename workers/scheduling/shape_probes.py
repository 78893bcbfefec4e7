"""Probes (exploration): a few steps of a shape that seems worse than the best, to measure its acceptance or time.

Used by `aerie.workers.scheduling.shape_choice`. Pure: time is counted in steps. Each step adds to a credit of time for
probes. So every shape is measured eventually, and all probes together cost a bounded share of the time.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.shape_rates import Acceptance, Rates, informed_shapes
from aerie.workers.scheduling.timing.step import Step
from aerie.workers.scheduling.timing.step_time import StepTime

FIRST_RESULTS = 3  # steps from a shape's first round to its result on the host
PROBING_SHARE = 1 / 150  # credit per step for probes of promising or untimed shapes, as a share of the step's time
OLD_SHARE = 1 / 500  # credit per step for probes of shapes without recent results
FIRST_ROUNDS = 3  # rounds of time that probes may cost in excess of the credit
MAX_ROUNDS = 6.0  # bound on the credit, in rounds of time
PAID_SHARE = 1 / 2  # share of the cost of a probe's first rounds that the credit must cover before it starts
PROBE_AGE = 128  # steps without results after which a shape is probed again
MAX_PROBE_STEPS = 16  # maximum steps of a probe whose shape stays promising
TIMED_STEPS = 2  # steps that measure a shape's time
FREE_PROBES = 3  # free timing probes per shape and batch size


@dataclass
class Probe:
    """A trial of a shape.

    min_steps: minimum steps.
    max_steps: maximum steps; after min_steps the probe ends as soon as its shape is no longer promising.
    steps: steps so far.
    is_old: whether it started because the shape had no recent results.
    is_free: whether it is not charged, because the shape has hardly run at this batch size.
    budget: rounds of time that it may cost; after min_steps the probe ends when they are spent.
    """

    shape: int
    min_steps: int
    max_steps: int
    steps: int = 1
    is_old: bool = False
    is_free: bool = False
    budget: float = math.inf


class ShapeProbes:
    """Starts, ends and charges probes. current: the probe that runs; None without one."""

    def __init__(self, survival: Acceptance, shapes: RoundShapes) -> None:
        num_shapes = len(shapes)
        self.current: Probe | None = None
        self._informs = informed_shapes(survival, num_shapes)
        # the first step of a probe only drafts its shape, if a step may verify another shape than it drafts
        self._timed_steps = TIMED_STEPS + shapes.verifies_last_drafts
        # last step that measured each shape's acceptance, before the last change of shape
        self._informed = np.full(num_shapes, -PROBE_AGE, np.int64)
        self._last_step, self._last_shape = -PROBE_AGE, 0
        # credit for probes, in rounds; negative after a probe that cost more
        self._credit = self._old_credit = 0.0
        self._num_pace_changes = 0
        self._num_free: Counter[tuple[int, int]] = Counter()  # free probes so far, by shape and log2 of the batch size
        self._ended: deque[tuple[int, Probe]] = deque()  # uncharged, each with the step from which on it can be charged

    @property
    def is_idle(self) -> bool:
        """Whether no probe runs or waits for its last results."""
        return self.current is None and not self._ended

    def count_step(self, step: int, shape: int) -> None:
        """Record that step number `step` runs `shape`."""
        self._credit = min(self._credit + PROBING_SHARE, MAX_ROUNDS)
        self._old_credit += OLD_SHARE
        if shape != self._last_shape:
            self._inform()
        self._last_step, self._last_shape = step, shape

    def _inform(self) -> None:
        self._informed[self._informs[self._last_shape]] = self._last_step

    def advance(self, rates: Rates, shape: int, allowed: Sequence[int], step: int) -> bool:
        """Continue or end the current probe. Return whether it has just ended.

        shape: the shape that runs without a probe.
        allowed: shapes that this step may run.
        """
        probe = self.current
        if probe is None:
            return False
        if probe.shape == shape:
            self.current = None  # the probed shape has become the best
            return False
        is_spent = probe.steps * rates.min_loss(probe.shape) >= probe.budget * rates.ms[shape]
        is_over = probe.steps >= probe.min_steps and (is_spent or not rates.is_promising(probe.shape))
        if is_over or probe.steps >= probe.max_steps or probe.shape not in allowed:
            return self.end(step)
        probe.steps += 1
        return False

    def end(self, step: int) -> bool:
        """End the current probe. Return whether there was one. It is charged once its last results, with the time of
        its rounds, have arrived."""
        if self.current is None:
            return False
        self._ended.append((step + FIRST_RESULTS, self.current))
        self.current = None
        return True

    def charge(self, rates: Rates, shape: int, step: int) -> None:
        """Charge ended probes with the time that they cost. shape: the shape that runs without a probe."""
        while self._ended and self._ended[0][0] <= step:
            probe = self._ended.popleft()[1]
            lost_ms = probe.steps * rates.min_loss(probe.shape) + rates.change_loss(probe.shape, shape)
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
        """Start a probe if one is due. Return whether it did. In this order:

        - A shape that has never run at this batch size is timed at once, because the measured table may be wrong. So is
          a shape that has hardly run and may still be the best.
        - A shape whose time is uncertain is timed if the credit covers that.
        - A promising shape is probed if the credit covers its first rounds, until the credit is spent; otherwise one
          probe of a tree could cost the credit of a thousand steps.
        - A shape without recent results is probed once its own credit covers that.

        with_prompts: whether the step has prompt chunks, so that it does not show the time of a shape's rounds alone.
        """
        if self._ended or not step_time.is_settled:
            return False
        if step_time.num_pace_changes != self._num_pace_changes:  # the debt may be based on wrong times
            self._num_pace_changes, self._credit = step_time.num_pace_changes, max(self._credit, 0.0)
        others = [other for other in allowed if other != shape]
        round_ms = rates.ms[shape]
        left_ms = (self._credit + FIRST_ROUNDS) * round_ms
        if not with_prompts and (timed := self._timing_probe(rates, others, num_requests, step_time, left_ms)):
            self.current = timed
            return True
        promising = [other for other in others if rates.is_promising(other) and self._can_pay(rates, other, left_ms)]
        if promising:
            best = max(promising, key=rates.upper.__getitem__)
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
        """Return whether the credit covers `PAID_SHARE` of the probe's first rounds, or is at its maximum. If changes
        of shape are free, it must only be positive."""
        if rates.changes_are_free or self._credit >= MAX_ROUNDS:
            return left_ms > 0.0
        return PAID_SHARE * FIRST_RESULTS * rates.min_loss(shape) < left_ms

    def _timing_probe(
        self, rates: Rates, others: Sequence[int], num_requests: int, step_time: StepTime, left_ms: float
    ) -> Probe | None:
        """Return a probe that measures a shape's time, if one is due."""
        batch = (num_requests - 1).bit_length()

        def is_free(shape: int) -> bool:
            has_run = step_time.has_run(Step(shape, num_requests))
            is_left = self._num_free[shape, batch] < FREE_PROBES
            return not has_run or (is_left and rates.has_uncertain_time(shape) and rates.may_be_best(shape))

        free = [other for other in others if is_free(other)]
        if free:
            shape = rates.min_loss_shape(free)
            self._num_free[shape, batch] += 1
            return Probe(shape, self._timed_steps, self._timed_steps, is_free=True)
        uncertain = [o for o in others if rates.has_uncertain_time(o) and TIMED_STEPS * rates.min_loss(o) < left_ms]
        return Probe(rates.min_loss_shape(uncertain), self._timed_steps, self._timed_steps) if uncertain else None
