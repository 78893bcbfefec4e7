"""Finds all coordinators, keeps a link to each, and chooses an engine for each request. A link carries requests to its
coordinator, and tokens, ends and the engine's state back. The search is an argument, so that tests need no Ray."""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping

from aerie.cluster.http.engine_client import EngineRefused
from aerie.cluster.ingress.adapter_changes import AdapterChanges
from aerie.cluster.ingress.attempts import EngineFailed, RequestStream
from aerie.cluster.ingress.routing import EngineView, Prompt, Routing, choose, is_stuck
from aerie.cluster.transport.admin import LoadLora, UnloadLora
from aerie.cluster.transport.channel import Context, Listener, connect_engine
from aerie.cluster.transport.encoding import BadMessageError, decode_numbered, encode
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
        """Process one message of the engine. A malformed one ends the connection."""
        try:
            message = decode_numbered(raw, self._num_received)
        except BadMessageError as error:
            logger.error("the connection to a coordinator is given up: %s", error)
            self._lose(str(error))
            return
        self._num_received += 1
        self._aborts.send()  # those that the connection has not accepted yet
        if isinstance(message, TokenBatch):
            self._deliver(message)
        elif isinstance(message, EngineState):
            self.view.update(message, self._clock())
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


Find = Callable[[Collection[str]], Awaitable[Mapping[str, str]]]

FIND_PERIOD_S = 1.0  # between searches for coordinators
FIND_HASTE_S = 0.1  # the same while a request waits for an engine
CONNECT_LIMIT_S = 10.0  # from opening a link to the engine's first message
SUCCESSOR_WAIT_S = 60.0  # maximum wait for the engine that replaces a leaving one


class EngineLinks:
    """The reachable engines, over ZeroMQ. Used by `aerie.cluster.ingress.remote_engines`.

    find: takes names of known engines; returns the inbox endpoint of every living coordinator by name, "" for known
        ones and for those that accept no requests yet.
    routing: how engines are chosen.
    identity: identity of the engines that may be chosen (`aerie.cluster.plan.identity`).
    """

    def __init__(
        self,
        context: Context,
        transport: Transport,
        find: Find,
        routing: Routing = "first_token",
        identity: str = "",
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._transport = transport
        self._find = find
        self._routing = routing
        self._identity = identity
        self._clock = clock
        self._chance = random.Random(seed)
        self.adapter_changes = AdapterChanges()
        self._links: dict[str, EngineLink] = {}
        self._opened_s: dict[str, float] = {}
        # the ingress may have started while an engine is being replaced
        self._successor_by_s = clock() + SUCCESSOR_WAIT_S
        self._server_ends = False
        self._has_met = False  # an engine of this identity
        self._foreign: set[str] = set()  # reported engines of another identity
        self._num_waiting = 0
        self._changed = asyncio.Event()  # set when a report comes or a link ends
        self._wanted = asyncio.Event()  # set while a request waits for an engine
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def choose(self, prompt: Prompt, avoid: frozenset[str], wait_s: float) -> str | None:
        """Return the name of the engine for a request; None if there is none within `wait_s`.

        avoid: engines that did not accept this request, which are not returned.
        wait_s: unless 0, extended to `SUCCESSOR_WAIT_S` after this ingress started or a leaving engine's loss, because
            a new engine is expected. Does not wait if all engines drain and none is being replaced.
        """
        wait_s = 0.0 if self._server_ends else wait_s
        deadline_s = self._clock() + wait_s
        while True:
            views = {name: link.view for name, link in self._links.items() if name not in self._foreign}
            name = choose(views, prompt, self._clock(), self._chance, avoid, self._routing)
            remaining_s = (max(deadline_s, self._successor_by_s) if wait_s else deadline_s) - self._clock()
            if name is not None or remaining_s <= 0:
                return name
            self._changed.clear()
            self._wanted.set()
            self._num_waiting += 1
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(remaining_s):
                        await self._changed.wait()
            finally:
                self._num_waiting -= 1

    def start(self, name: str, message: GenerateRequest | Probe, prompt: Prompt) -> RequestStream:
        """Send a request to the engine that `choose` returned; see `EngineLink.start`."""
        link = self._links[name]
        if isinstance(message, GenerateRequest):
            link.view.record_request(prompt, self._clock())
        return link.start(message)

    def adapters(self) -> dict[str, str]:
        """Return the folders of the LoRA adapters that an engine has, by name."""
        return self.adapter_changes.loaded(link.view for link in self._links.values())

    def lacking_adapters(self) -> list[LoadLora | UnloadLora]:
        """Return calls for the changes of adapters that a ready engine lacks (`AdapterChanges.lacking`)."""
        return self.adapter_changes.lacking(
            link.view for name, link in self._links.items() if name not in self._foreign
        )

    def suspect(self, name: str) -> None:
        """Record that an engine did not accept a request in time: others are preferred until its next report."""
        if name in self._links:
            self._links[name].view.is_suspect = True

    def is_stuck(self, name: str) -> bool:
        """Return whether an engine's requests should move to another one (`routing.is_stuck`)."""
        views = {name: link.view for name, link in self._links.items() if name not in self._foreign}
        return is_stuck(views, name, self._clock())

    def close(self) -> None:
        """End all links."""
        self._task.cancel()
        for link in self._links.values():
            link.fail("the ingress is stopped")

    async def _keep(self) -> None:
        """Look for engines forever: every `FIND_PERIOD_S`, and more often while requests wait for one."""
        while True:
            try:
                self._drop_lost()
                await self._look()
            except TimeoutError:
                pass  # the search has logged it; keep the links
            except Exception:
                logger.exception("the search for engines failed")
            self._wanted.clear()
            if self._num_waiting:
                await asyncio.sleep(FIND_HASTE_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIND_PERIOD_S):
                    await self._wanted.wait()

    async def _look(self) -> None:
        """Open links to new coordinators, and close the links to coordinators that are gone."""
        endpoints = await self._find(self._links.keys())
        now = self._clock()
        for name in [name for name in self._links if name not in endpoints]:
            self._drop(name, "its process has ended")
        for name, endpoint in endpoints.items():
            if endpoint and name not in self._links:
                try:
                    self._links[name] = EngineLink(
                        self._context, self._transport, endpoint, self._on_report, self._clock
                    )
                except ValueError:
                    logger.exception("no link to engine %s", name)
                    continue
                self._opened_s[name] = now

    def _drop_lost(self) -> None:
        """Close the links that have ended, and those whose engine has never reported."""
        overdue_s = self._clock() - CONNECT_LIMIT_S
        for name, link in list(self._links.items()):
            if link.lost:
                self._drop(name, link.lost)
            elif link.view.state is None and self._opened_s[name] < overdue_s:
                self._drop(name, f"it has sent nothing for {CONNECT_LIMIT_S:g} s")

    def _drop(self, name: str, reason: str) -> None:
        logger.warning("the link to engine %s is closed: %s", name, reason)
        self._links.pop(name).fail(reason)
        self._foreign.discard(name)
        del self._opened_s[name]

    def _on_report(self) -> None:
        """Process a report of any engine: ignore engines of another model, note adapters, and decide whether this
        ingress may expect a successor of its engines or ends with them."""
        reported = {name: link.view.state for name, link in self._links.items() if link.view.state is not None}
        foreign = {name for name, state in reported.items() if state.identity != self._identity}
        for name in foreign - self._foreign:
            logger.warning("engine %s has another model or version; this ingress does not use it", name)
        self._foreign = foreign
        for name in reported.keys() - foreign:
            self.adapter_changes.update(self._links[name].view)
        states = [state for name, state in reported.items() if name not in foreign]
        self._has_met = self._has_met or bool(states)
        if self._has_met and any(reported[name].status == "ready" for name in foreign):
            # Successors of this application's engines answer other ingresses: none will come for this one.
            self._successor_by_s = -math.inf
            self._server_ends = all(state.is_leaving or state.status == "draining" for state in states)
        elif any(state.is_leaving for state in states):
            self._successor_by_s = self._clock() + SUCCESSOR_WAIT_S
        elif any(state.status in ("ready", "draining") for state in states):
            self._successor_by_s = -math.inf
            self._server_ends = all(state.status == "draining" for state in states)
        self._drop_lost()
        self._changed.set()
