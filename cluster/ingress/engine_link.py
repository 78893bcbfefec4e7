"""The connection to one coordinator. It carries requests there, and tokens, ends and the engine's state back."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from aerie.cluster.http.engine_client import EngineRefused
from aerie.cluster.ingress.attempts import EngineFailed
from aerie.cluster.ingress.request_stream import RequestStream
from aerie.cluster.ingress.routing import EngineView
from aerie.cluster.transport.channel import Context, connect_engine
from aerie.cluster.transport.encoding import BadMessageError, decode_numbered, encode
from aerie.cluster.transport.listener import Listener
from aerie.cluster.transport.messages import (
    Abort,
    EngineState,
    GenerateRequest,
    Probe,
    Refusal,
    Refused,
    Subscribe,
    TokenBatch,
    TokenDelta,
)
from aerie.cluster.transport.sockets import Transport

logger = logging.getLogger(__name__)


class EngineLink:
    """A link to one coordinator, in one asyncio loop. All messages arrive on one connection, in order and numbered. If
    a message or the connection is lost, the link and all its requests end; `EngineLinks` opens a new link.

    view: the engine's state as last reported.
    lost: why the link has ended; "" while it works.
    inbox: the coordinator's endpoint.
    on_state: called after each report, and when the link ends.
    """

    def __init__(
        self,
        context: Context,
        transport: Transport,
        inbox: str,
        on_state: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.view = EngineView()
        self.lost = ""
        self._on_state = on_state
        self._clock = clock
        self._streams: dict[str, RequestStream] = {}  # by request id; requests that have not ended
        self._num_received = 0
        socket, self._monitor = connect_engine(context, transport, inbox)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._monitor.socket.fileno(), self._check)
        self._loop.call_soon(self._check)  # the descriptor signals new messages only, not those that have come already
        self._listener = Listener(socket, self._take)
        self._aborts = RequestAborts(self._listener.send)
        self._listener.send(encode(Subscribe()))

    def start(self, message: GenerateRequest | Probe) -> RequestStream:
        """Send a request. The stream fails with EngineRefused or EngineFailed; closing it aborts the request."""
        request_id = message.request_id
        stream = RequestStream(lambda closed: self._close(request_id, closed))
        if self.lost:
            stream.fail(EngineFailed(self.lost, had_taken=True))
        elif request_id in self._streams:
            stream.fail(EngineRefused(Refusal("too_large", f"request id {request_id} is in use")))
        elif not self._listener.send(encode(message)):
            stream.fail(EngineFailed("the coordinator does not read its requests", had_taken=True))
        else:
            self._streams[request_id] = stream
        return stream

    def fail(self, reason: str) -> None:
        """End this link and all its requests."""
        if self.lost:
            return
        self.lost = reason
        self._loop.remove_reader(self._monitor.socket.fileno())
        self._monitor.close()
        self._listener.close()
        for stream in self._streams.values():
            stream.fail(EngineFailed(reason, had_taken=True))
        self._streams.clear()
        self._aborts.clear()

    def _close(self, request_id: str, stream: RequestStream) -> None:
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._aborts.abort(request_id)

    def _check(self) -> None:
        if not self.lost and (reason := self._monitor.check()) is not None:
            self._listener.read_rest()
            self._lose(f"the coordinator is gone: {reason}")

    def _lose(self, reason: str) -> None:
        self.fail(reason)
        self._on_state()

    def _take(self, raw: bytes) -> None:
        try:
            message = decode_numbered(raw, self._num_received)
        except BadMessageError as error:
            logger.error("the connection to a coordinator is given up: %s", error)
            self._lose(str(error))
            return
        self._num_received += 1
        self._aborts.send()
        if isinstance(message, TokenBatch):
            self._deliver(message)
        elif isinstance(message, EngineState):
            self.view.heard(message, self._clock())
            self._on_state()
        elif isinstance(message, Refused) and (stream := self._streams.pop(message.request_id, None)) is not None:
            stream.fail(EngineRefused(message.refusal))

    def _deliver(self, batch: TokenBatch) -> None:
        """Put deltas into their streams, first tokens first: readers run in this order, and take about 0.1 ms each."""
        running: list[tuple[RequestStream, TokenDelta]] = []
        for delta in batch.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue  # the stream was closed

            if delta.finish is not None:
                del self._streams[delta.request_id]
            if stream.is_taken:
                running.append((stream, delta))
            else:
                stream.put(delta)
        for stream, delta in running:
            stream.put(delta)


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
