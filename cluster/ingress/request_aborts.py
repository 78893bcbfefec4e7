"""Sends aborts of requests whose clients are gone, until the engine accepts them. The coordinator ends such a request
in `cluster.coordinator.request_streams`, and the scheduler in `Scheduler.abort`."""

from collections import deque
from collections.abc import Callable

from cluster.transport.encoding import encode
from cluster.transport.messages import Abort


class RequestAborts:
    """The aborts for one engine, in order. The queue to a coordinator that hangs may be full and refuse them for a
    while.

    send_message: sends a message; returns whether the queue accepted it.
    """

    def __init__(self, send_message: Callable[[bytes], bool]) -> None:
        self._send_message = send_message
        self._unsent: deque[str] = deque()

    def abort(self, request_id: str) -> None:
        """Abort a request, now or with a later `send`."""
        self._unsent.append(request_id)
        self.send()

    def send(self) -> None:
        """Send the remaining aborts, as many as the queue accepts."""
        while self._unsent and self._send_message(encode(Abort(self._unsent[0]))):
            self._unsent.popleft()

    def clear(self) -> None:
        """Drop the remaining aborts, because the engine is gone."""
        self._unsent.clear()
