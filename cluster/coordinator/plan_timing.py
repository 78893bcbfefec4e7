"""Decides when the next plan is sent: just before the running step ends. Pure; used by `cluster.coordinator.loop`.

A plan that is sent early waits at the ranks for a whole step, and requests that arrive meanwhile are only in the plan
after it. A plan that is sent late leaves the device idle. So the plan is held until shortly before the expected end of
the running step.
"""

import math
from collections import deque
from dataclasses import dataclass

from workers.scheduling.step_time import Prediction

LEAD_S = (
    0.002  # a plan should be at rank 0 this long before the step before it ends: on a GPU it takes 1.3 ms to launch
)
FIRST_MARGIN_S = 0.0025
MIN_MARGIN_S = 0.0005
_MAX_CORRECTION_S = 0.001  # per result, which may be late for other reasons than the plan
_RELAXING = 0.02  # share of what was spare that the margin gives back; a quarter of a second until it is found


@dataclass(frozen=True)
class _Sent:
    """A plan without a result. expected: what its step should take; None if nothing is known."""

    sent_s: float
    expected: Prediction | None


class PlanTiming:
    """Holds plans back while the one before runs. All times are of one clock, in seconds.

    The end of the step that runs is predicted by `StepTime`, less one standard deviation: holding back
    too long leaves the device idle, sending early only keeps requests out of a plan. The margin before it is learned:
    rank 0 says how long a plan was there when its step ended, so that one sees how long before the end of the step
    before it came. Where that was too late, the margin grows by what was missing; else it shrinks slowly. With
    `max_in_flight` plans none may be sent; without a prediction one may at once.

    margin_s: how long before the predicted end a plan is sent.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self.reset()

    def reset(self) -> None:
        """Other ranks: nothing is in flight, and nothing is known of them."""
        self.margin_s = FIRST_MARGIN_S
        self._in_flight: deque[_Sent] = deque()
        self._last_result_s = -math.inf

    def due_s(self) -> float:
        """Time from which the next plan may be sent: -inf for at once, inf for after another result."""
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

    def sent(self, now: float, expected: Prediction | None) -> None:
        """Record that a plan was sent. expected: time of its step; None if unknown."""
        self._in_flight.append(_Sent(now, expected))

    def answered(self, now: float, elapsed_s: float) -> None:
        """The oldest plan's result has come. elapsed_s: from when rank 0 had the plan to the end of its step."""
        due_s, step, before_s = self.due_s(), self._in_flight.popleft(), self._last_result_s
        self._last_result_s = now
        if not self._in_flight and due_s > now:  # the step ended while the next plan was still held back
            self._correct(-_MAX_CORRECTION_S)
        elif step.sent_s < before_s:  # while the step before ran
            self._correct(elapsed_s - (now - before_s) - LEAD_S)

    def _correct(self, spare_s: float) -> None:
        """The last plan was there by `spare_s` earlier than it must; negative: too late."""
        if spare_s < 0:
            self.margin_s += min(-spare_s, _MAX_CORRECTION_S)
        else:
            self.margin_s = max(MIN_MARGIN_S, self.margin_s - _RELAXING * min(spare_s, _MAX_CORRECTION_S))
