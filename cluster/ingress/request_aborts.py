"""Aborts of requests whose readers are gone, until the engine has taken them. The coordinator ends such a request in
`cluster.coordinator.request_streams`, and the scheduler in `Scheduler.abort`."""

from collections import deque
from collections.abc import Callable

from cluster.transport.encoding import encode
from cluster.transport.messages import Abort


class RequestAborts:
    """The aborts for one engine, in order. A coordinator that hung for a while has a full queue, which refuses them.

    send_message: returns whether the queue has taken a message.
    """

    def __init__(self, send_message: Callable[[bytes], bool]) -> None:
        self._send_message = send_message
        self._unsent: deque[str] = deque()

    def abort(self, request_id: str) -> None:
        """Abort a request, now or with a later `send`."""
        self._unsent.append(request_id)
        self.send()

    def send(self) -> None:
        """Send as many as the engine takes."""
        while self._unsent and self._send_message(encode(Abort(self._unsent[0]))):
            self._unsent.popleft()

    def clear(self) -> None:
        """Forget all: the engine is gone."""
        self._unsent.clear()
