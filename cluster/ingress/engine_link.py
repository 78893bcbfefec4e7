"""An ingress's connection to one coordinator: requests out, how they ended and the engine's state back."""

import asyncio
import logging
import time
from collections.abc import Callable

from cluster.ingress.routing import EngineView
from cluster.transport.channel import Context, connect_engine
from cluster.transport.encoding import BadMessageError, decode, encode
from cluster.transport.listener import Listener
from cluster.transport.messages import (
    Abort,
    EngineState,
    GenerateRequest,
    GenerateSummary,
    Probe,
    Refusal,
    Refused,
    Subscribe,
)
from cluster.transport.sockets import PeerMonitor, Transport

logger = logging.getLogger(__name__)

Answer = GenerateSummary | Refusal


class EngineLostError(RuntimeError):
    """The coordinator is lost, and with it the request; it may be resumed on another engine."""


class EngineLink:
    """Runs in one asyncio loop.

    view: what the engine tells.
    lost: why it is of no use any more, or "".
    inbox: the coordinator's endpoint.
    on_state: called when the engine has told something.
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
        self._calls: dict[str, asyncio.Future[Answer]] = {}
        socket = connect_engine(context, transport, inbox)
        self._monitor = PeerMonitor(socket)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._monitor.socket.fileno(), self._check)
        self._listener = Listener(socket, self._take)
        self.subscribe(whole=True)

    def subscribe(self, whole: bool = False) -> None:
        """Go on hearing the engine's state; to be called every few seconds."""
        self._listener.send(encode(Subscribe(whole, self.view.num_sent)))

    def start(self, message: GenerateRequest | Probe) -> "asyncio.Future[Answer]":
        """Hand a request over; the future is how it ends, or raises EngineLostError. Cancelling it aborts the
        request."""
        call: asyncio.Future[Answer] = self._loop.create_future()
        request_id = message.request_id
        if self.lost:
            call.set_exception(EngineLostError(self.lost))
        elif request_id in self._calls:
            call.set_result(Refusal(kind="too_large", message=f"request id {request_id} is in use"))
        elif not self._listener.send(encode(message)):
            call.set_exception(EngineLostError("the coordinator does not read its requests"))
        else:
            self._calls[request_id] = call
            call.add_done_callback(lambda done: self._ended(request_id, done))
        return call

    def fail(self, reason: str) -> None:
        """End all calls, and this link."""
        if self.lost:
            return
        self.lost = reason
        self._loop.remove_reader(self._monitor.socket.fileno())
        self._monitor.close()
        self._listener.close()
        for call in list(self._calls.values()):
            if not call.done():
                call.set_exception(EngineLostError(reason))

    def _ended(self, request_id: str, call: "asyncio.Future[Answer]") -> None:
        del self._calls[request_id]
        if not call.cancelled():
            call.exception()  # looked at, whether or not its reader still is there
        elif not self.lost:
            self._listener.send(encode(Abort(request_id)))

    def _check(self) -> None:
        reason = self._monitor.check()
        if reason is not None:
            self.fail(f"the coordinator is gone: {reason}")
            self._on_state()

    def _take(self, raw: bytes) -> None:
        try:
            message = decode(raw)
        except BadMessageError:
            logger.exception("a coordinator sent something unreadable")
            return
        if isinstance(message, EngineState):
            if not self.view.heard(message, self._clock()):
                self.subscribe(whole=True)
            self._on_state()
        elif isinstance(message, Refused):
            self._end(message.request_id, message.refusal)
        elif isinstance(message, GenerateSummary):
            self._end(message.request_id, message)

    def _end(self, request_id: str, answer: Answer) -> None:
        call = self._calls.get(request_id)
        if call is not None and not call.done():  # it may have been cancelled meanwhile
            call.set_result(answer)
