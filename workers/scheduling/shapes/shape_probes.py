"""Probes (exploration): a few steps of a shape that seems worse than the best, to measure its acceptance or time.

Used by `shape_choice`. Pure: time is counted in steps. Each step adds to a credit of time for probes. So every shape is
measured eventually, and all probes together cost a bounded share of the time.
"""

from collections.abc import Sequence

import numpy as np

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.shapes.acceptance import Acceptance
from aerie.workers.scheduling.shapes.shape_rates import KNOWN_ERROR, Load, Rates
from aerie.workers.scheduling.timing.step import Step
from aerie.workers.scheduling.timing.step_time import StepTime

FIRST_RESULTS = 3  # steps from a shape's first round to its result on the host
PROBING_SHARE = 1 / 150  # credit per step for probes of promising shapes, in rounds
OLD_SHARE = 1 / 500  # the same for probes of shapes without recent results
FIRST_CREDIT, MAX_CREDIT = 4.0, 9.0  # rounds; bounds what one probe may cost
PAID_SHARE = 1 / 2  # share of the cost of a promising shape's first rounds that the credit must cover
PROMISING_ABOVE = 1 / 40  # a shape is promising if its upper bound exceeds the best rate by this share
MAX_PROBE_STEPS = 16  # of a promising shape
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
        self._num_steps = self._min_steps = self._max_steps = 0  # of the current probe
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
        found = [o for o in others if self._is_promising(rates, o, shape) and self._credit >= PAID_SHARE * costs[o]]
        is_old = not found
        if is_old and others:
            # the oldest alone, however cheap others are; of equal ones the last, whose rounds tell of the others
            oldest = min(others, key=lambda other: (self._last_step[other], -other))
            is_due = step - self._last_step[oldest] > PROBE_AGE and self._old_credit >= costs[oldest]
            found = [oldest] if is_due else []
        if found:
            probed = max(found, key=rates.upper.__getitem__)
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
