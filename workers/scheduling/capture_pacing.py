"""Decides when a serving engine captures another CUDA graph. Pure; used by `aerie.workers.scheduling.scheduler`.

A capture blocks the ranks for 30 to 200 ms. So it waits for 0.5 s without requests, after which it rarely delays one.
If requests never pause, it runs once steps have lost as much time to padding, because of the missing graph, as the
capture takes. So captures never cost more than they could have saved.
"""

import math
from collections.abc import Callable

from aerie.workers.scheduling.plan import GraphCount

IDLE_S = 0.5  # after the last request


class CapturePacing:
    """Paces captures.

    busy_interval_s: minimum seconds between captures while requests run; 0: capture everything before the next step.
    clock: returns seconds.
    graphs: the ranks' last report.
    in_flight: a capture is planned and has no result yet.
    row_ms: milliseconds that a row adds to a step; None if unknown: then any padding justifies a capture.
    """

    def __init__(self, busy_interval_s: float, clock: Callable[[], float]) -> None:
        self._interval_s = busy_interval_s
        self._clock = clock
        self._last_request_s = -math.inf
        self.row_ms: float | None = None
        self.reset()

    def reset(self) -> None:
        """Start again with new ranks."""
        self.graphs = GraphCount()
        self.in_flight = False
        self._since_s = self._clock()

    def is_due(self, is_idle: bool) -> bool:
        """Return whether the next plan must be a capture, which is sent when no step is in flight. is_idle: whether
        there are no requests."""
        now_s = self._clock()
        if not is_idle:
            self._last_request_s = now_s
        if self.in_flight:
            return True
        if self.graphs.num_waiting == 0:
            return False
        if now_s >= self._last_request_s + IDLE_S:
            return True
        return now_s >= self._since_s + self._interval_s and (self._interval_s == 0.0 or self._is_missed)

    @property
    def _is_missed(self) -> bool:
        """Return whether padding has cost as much time as capturing the next graph."""
        graphs, row_ms = self.graphs, self.row_ms
        return graphs.missed_rows > 0 and (row_ms is None or graphs.missed_rows * row_ms >= graphs.capture_ms)

    def has_ended(self, graphs: GraphCount) -> bool:
        """Store the graph count of a result. Return whether it is the result of a capture."""
        self.graphs = graphs
        if not self.in_flight:
            return False
        self.in_flight = False
        self._since_s = self._clock()
        return True
