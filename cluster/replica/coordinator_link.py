"""The engine replica's end towards its coordinator: requests out, how they ended back. Runs in one asyncio loop."""

import asyncio
import logging

from cluster.transport.channel import Context, connect_engine
from cluster.transport.encoding import BadMessageError, decode, encode
from cluster.transport.listener import Listener
from cluster.transport.messages import Abort, GenerateRequest, GenerateSummary, Probe, Refusal, Refused
from cluster.transport.sockets import Transport

logger = logging.getLogger(__name__)


class EngineLostError(RuntimeError):
    """The coordinator is lost, and with it the request; it may be resumed on another engine."""


class CoordinatorLink:
    """inbox: the coordinator's endpoint."""

    def __init__(self, context: Context, transport: Transport, inbox: str) -> None:
        self._calls: dict[str, asyncio.Future[GenerateSummary | Refusal]] = {}
        self._listener = Listener(connect_engine(context, transport, inbox), self._take)

    async def run(self, request: GenerateRequest | Probe) -> GenerateSummary | Refusal:
        """Hand a request over and wait for its end; if that is cancelled, the request is aborted.

        Raises EngineLostError."""
        call: asyncio.Future[GenerateSummary | Refusal] = asyncio.get_running_loop().create_future()
        if request.request_id in self._calls:
            return Refusal(kind="too_large", message=f"request id {request.request_id} is in use")
        self._calls[request.request_id] = call
        try:
            if not self._listener.send(encode(request)):
                raise EngineLostError("the coordinator does not read its requests")
            return await call
        except asyncio.CancelledError:
            self._listener.send(encode(Abort(request.request_id)))
            raise
        finally:
            del self._calls[request.request_id]

    def fail(self, reason: str) -> None:
        """End all calls, and this link."""
        self._listener.close()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineLostError(reason))

    def _take(self, raw: bytes) -> None:
        try:
            message = decode(raw)
        except BadMessageError:
            logger.exception("the coordinator sent something unreadable")
            return
        if isinstance(message, Refused):
            self._end(message.request_id, message.refusal)
        elif isinstance(message, GenerateSummary):
            self._end(message.request_id, message)

    def _end(self, request_id: str, answer: GenerateSummary | Refusal) -> None:
        call = self._calls.get(request_id)
        if call is not None and not call.done():  # it may have been cancelled meanwhile
            call.set_result(answer)
