"""Decides when a serving engine captures another CUDA graph. Pure; used by `aerie.workers.scheduling.scheduler`.

A capture blocks the ranks for 30 to 200 ms. So it waits for 0.5 s without requests, after which it rarely delays one.
If requests never pause, it runs once steps have lost as much time to padding, because of the missing graph, as the
capture takes. So captures never cost more than they could have saved.
"""

import logging
import math
from collections.abc import Callable, Sequence

from aerie.workers.scheduling.commands.command import Captured, CommandAnswer, first_error
from aerie.workers.scheduling.plan import GraphCount

logger = logging.getLogger(__name__)

IDLE_S = 0.5  # after the last request


class CapturePacing:
    """Paces captures.

    busy_interval_s: minimum seconds between captures while requests run; 0: capture everything before the next step.
    clock: returns seconds.
    graphs: the ranks' last report.
    is_pending: a capture is queued, and has no answer yet.
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
        self.is_pending = False
        self._has_failed = False
        self._since_s = self._clock()

    def is_due(self, is_idle: bool) -> bool:
        """Return whether to queue a capture now. is_idle: whether there are no requests."""
        now_s = self._clock()
        if not is_idle:
            self._last_request_s = now_s
        if self.graphs.num_waiting == 0 or self.is_pending or self._has_failed:
            return False
        if now_s >= self._last_request_s + IDLE_S:
            return True
        return now_s >= self._since_s + self._interval_s and (self._interval_s == 0.0 or self._is_missed)

    @property
    def _is_missed(self) -> bool:
        """Return whether padding has cost as much time as capturing the next graph."""
        graphs, row_ms = self.graphs, self.row_ms
        return graphs.missed_rows > 0 and (row_ms is None or graphs.missed_rows * row_ms >= graphs.capture_ms)

    def answered(self, answers: Sequence[CommandAnswer]) -> None:
        """Store the graph counts after a capture. After an error there are no further captures with these ranks."""
        self.is_pending = False
        self._since_s = self._clock()
        if error := first_error(answers):
            self._has_failed = True
            if answers[0].rank >= 0:
                logger.warning("no further CUDA graphs are captured, because a capture failed: %s", error)
            return
        result = answers[0].result
        assert isinstance(result, Captured)
        self.graphs = result.graphs
