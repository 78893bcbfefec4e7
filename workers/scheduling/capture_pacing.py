"""When an engine that serves captures another step. Pure; used by `workers.scheduling.scheduler`.

A capture keeps the ranks busy for 30 ms to 0.2 s, in which nobody gets a token. So it waits until nobody has been there
for a moment, since who comes back soon would meet it. Where requests never leave, it comes once steps that are padded
for want of a graph have lost as much time as capturing that graph takes: whatever arrives afterwards, captures cost no
more than they could have saved.
"""

import math
from collections.abc import Callable

from workers.scheduling.plan import GraphCount

IDLE_S = 0.5  # after the last request


class CapturePacing:
    """busy_interval_s: seconds at least from the end of a capture, or from the start, to the next one while requests
    run; 0: captures come before every step until all is there.
    clock: in seconds.

    graphs: what the ranks said last.
    in_flight: a capture is planned, and its result has not come.
    row_ms: what a row adds to a step; None if that is not known, and any padding is enough.
    """

    def __init__(self, busy_interval_s: float, clock: Callable[[], float]) -> None:
        self._interval_s = busy_interval_s
        self._clock = clock
        self._last_request_s = -math.inf
        self.row_ms: float | None = None
        self.reset()

    def reset(self) -> None:
        """Other ranks: nothing is known of them."""
        self.graphs = GraphCount()
        self.in_flight = False
        self._since_s = self._clock()

    def is_due(self, is_idle: bool) -> bool:
        """Whether nothing may be planned but a capture, once no step is in flight. is_idle: no request is there."""
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
        """Whether the next graph would have saved what capturing it takes."""
        graphs, row_ms = self.graphs, self.row_ms
        return graphs.missed_rows > 0 and (row_ms is None or graphs.missed_rows * row_ms >= graphs.capture_ms)

    def has_ended(self, graphs: GraphCount) -> bool:
        """A result has come, and says that there are so many graphs now. Whether it is that of a capture."""
        self.graphs = graphs
        if not self.in_flight:
            return False
        self.in_flight = False
        self._since_s = self._clock()
        return True
