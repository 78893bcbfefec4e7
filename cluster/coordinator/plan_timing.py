"""Decides when the next plan is sent: just before the running step ends. Pure; used by
`aerie.cluster.coordinator.loop`.

A plan that is sent early waits at the ranks for a whole step, and requests that arrive in that time miss it. A plan
that is sent late leaves the device idle. So the plan is held until shortly before the expected end of the running step.
"""

import math
from collections import deque
from dataclasses import dataclass

from aerie.workers.scheduling.step_time import Prediction

LEAD_S = 0.002  # a plan should reach rank 0 this long before the previous step ends: a GPU launch takes 1.3 ms
FIRST_MARGIN_S = 0.0025  # margin before the first correction
MIN_MARGIN_S = 0.0005  # lower bound of the margin
_MAX_CORRECTION_S = 0.001  # per result, because the delay may have other causes than the plan
_RELAXING = 0.02  # share of the spare time by which the margin shrinks; it converges within a quarter of a second


@dataclass(frozen=True)
class _Sent:
    """A plan without a result. expected: time of its step; None if unknown."""

    sent_s: float
    expected: Prediction | None


class PlanTiming:
    """Delays a plan while the previous one runs. All times are seconds of one clock.

    `StepTime` predicts the end of the running step, less one standard deviation: a late plan leaves the device idle, an
    early one only misses later requests. The margin before that end is learned from rank 0's reports of how long before
    the end of the previous step each plan arrived. If it was too late, the margin grows by the missing time, else it
    shrinks slowly. No plan is sent while `max_in_flight` plans are in flight. Without a prediction, a plan is sent at
    once.

    margin_s: time before the predicted end at which a plan is sent.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self.reset()

    def reset(self) -> None:
        """Forget all plans and times, because the ranks are new."""
        self.margin_s = FIRST_MARGIN_S
        self._in_flight: deque[_Sent] = deque()
        self._last_result_s = -math.inf

    def due_s(self) -> float:
        """Return when the next plan may be sent: -inf: at once; inf: after another result."""
        if not self._in_flight:
            return -math.inf
        if len(self._in_flight) >= self._max_in_flight:
            return math.inf
        end_s = max(self._last_result_s, self._in_flight[0].sent_s)
        for step in self._in_flight:
            if step.expected is None:
                return -math.inf
            end_s += (step.expected.ms - step.expected.early_ms) / 1000
        return end_s - self.margin_s

    def record_plan(self, now: float, expected: Prediction | None) -> None:
        """Record that a plan was sent. expected: time of its step; None if unknown."""
        self._in_flight.append(_Sent(now, expected))

    def record_result(self, now: float, elapsed_s: float) -> None:
        """Record the oldest plan's result. elapsed_s: from its arrival at rank 0 to the end of its step."""
        due_s, step, before_s = self.due_s(), self._in_flight.popleft(), self._last_result_s
        self._last_result_s = now
        if not self._in_flight and due_s > now:  # the step ended while the next plan was delayed
            self._correct(-_MAX_CORRECTION_S)
        elif step.sent_s < before_s:  # during the previous step
            self._correct(elapsed_s - (now - before_s) - LEAD_S)

    def _correct(self, spare_s: float) -> None:
        """Correct the margin. spare_s: by how much the last plan came earlier than necessary; negative: too late."""
        if spare_s < 0:
            self.margin_s += min(-spare_s, _MAX_CORRECTION_S)
        else:
            self.margin_s = max(MIN_MARGIN_S, self.margin_s - _RELAXING * min(spare_s, _MAX_CORRECTION_S))
