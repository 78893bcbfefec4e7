"""The ingress's way to the engines: one Serve call per request, tokens on one ZeroMQ socket, statistics by name.

`RemoteEngines` implements `cluster.http.engine_client.EngineClient`. Serve and Ray are handed in as `EngineCalls`, so
that this module runs in tests without a cluster.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

from cluster.http.engine_client import EngineRefused
from cluster.transport.messages import (
    EngineAnswer,
    EngineStats,
    FlushOutcome,
    GenerateRequest,
    GenerateSummary,
    TokenBatch,
    TokenDelta,
)
from workers.scheduling.plan import SamplingParams, TokenLogprobs, pack_i32

logger = logging.getLogger(__name__)

STATS_MAX_AGE_S = 0.5
LAST_TOKENS_TIMEOUT_S = 5.0  # between the end of a call and its last tokens, which travel on another way


class EngineCalls(Protocol):
    """What the client needs from Serve and Ray."""

    def generate(self, payload: bytes) -> "asyncio.Future[bytes]":
        """Start one unary call on some engine; cancelling the future cancels the call."""
        ...

    async def stats(self) -> list[EngineStats]:
        """Statistics of every engine that is known, within a time limit."""
        ...

    async def flush_cache(self) -> list[FlushOutcome]:
        """Have every engine that is known empty its prefix cache, within a time limit."""
        ...


class _Stream:
    """Tokens of one request that its reader has not taken yet: everything that arrives meanwhile is one delta, so a
    slow reader costs its own tokens' memory and no queue can overflow."""

    def __init__(self) -> None:
        self.source: str | None = None
        self.changed = asyncio.Event()
        self.broken: str | None = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last: TokenDelta | None = None

    def put(self, delta: TokenDelta) -> None:
        self._tokens.extend(delta.tokens)
        self._logprobs.extend(delta.logprobs or ())
        self._last = delta
        self.changed.set()

    def fail(self, reason: str) -> None:
        self.broken = reason
        self.changed.set()

    def take(self, request_id: str) -> TokenDelta | None:
        """Everything since the last call as one delta, or None."""
        last, self._last = self._last, None
        self.changed.clear()
        if last is None:
            return None
        tokens, self._tokens = tuple(self._tokens), []
        logprobs, self._logprobs = tuple(self._logprobs), []
        return msgspec.structs.replace(last, request_id=request_id, tokens=tokens, logprobs=logprobs or None)


class TokenInbox:
    """Sorts token batches into streams and notices lost ones by their sequence numbers."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._expected: dict[str, int] = {}

    def open(self, request_id: str) -> _Stream:
        assert request_id not in self._streams, f"request id {request_id} is in use"
        stream = self._streams[request_id] = _Stream()
        return stream

    def close(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def deliver(self, batch: TokenBatch) -> None:
        """Hand a batch's deltas to their streams, first those that get their first one: readers run in this order, and
        an event takes each of them a tenth of a millisecond. After a gap in the sequence every stream that this source
        feeds, or might feed, is failed: its text would silently miss tokens."""
        expected = self._expected.get(batch.source, 0)
        if batch.sequence != expected:
            reason = f"token message {expected} of {batch.source} was lost (got {batch.sequence})"
            logger.error(reason)
            for waiting in self._streams.values():
                if waiting.source in (None, batch.source):
                    waiting.fail(reason)
        self._expected[batch.source] = batch.sequence + 1
        fed: list[tuple[_Stream, TokenDelta]] = []
        for delta in batch.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None or stream.broken is not None:
                continue
            if stream.source is None:
                stream.source = batch.source
                stream.put(delta)
            else:
                fed.append((stream, delta))
        for stream, delta in fed:
            stream.source = batch.source
            stream.put(delta)


class RemoteEngines:
    """EngineClient over Serve and ZeroMQ.

    inbox: fed with what arrives at `reply_to`.
    reply_to: where engines send tokens.
    resume: continue a request once on another engine if its engine fails.
    """

    def __init__(
        self,
        calls: EngineCalls,
        inbox: TokenInbox,
        reply_to: str,
        resume: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = calls
        self._inbox = inbox
        self._reply_to = reply_to
        self._max_attempts = 2 if resume else 1
        self._clock = clock
        self._stats: list[EngineStats] = []
        self._stats_until = float("-inf")
        self._stats_lock = asyncio.Lock()

    async def generate(
        self, prompt: list[int], sampling: SamplingParams, request_id: str, running_stats: bool = False
    ) -> AsyncGenerator[TokenDelta, None]:
        """See `EngineClient.generate`."""
        delivered: list[int] = []
        failure = ""
        for attempt in range(self._max_attempts):
            if finish := _already_finished(delivered, sampling):
                yield TokenDelta(request_id=request_id, tokens=(), finish=finish)
                return
            request = GenerateRequest(
                request_id=request_id if attempt == 0 else f"{request_id}~{attempt}",
                prompt=pack_i32(prompt),
                sampling=sampling,
                reply_to=self._reply_to,
                output=pack_i32(delivered),
                running_stats=running_stats,
            )
            try:
                async with contextlib.aclosing(self._attempt(request, request_id)) as deltas:
                    async for delta in deltas:
                        delivered.extend(delta.tokens)
                        yield delta
                        if delta.finish is not None:
                            return
            except EngineRefused as refused:
                if attempt == 0:
                    raise
                failure = f"the engine failed and no other took the request over: {refused}"
            except _EngineFailed as failed:
                failure = str(failed)
                logger.warning("request %s lost its engine after %d tokens: %s", request_id, len(delivered), failure)
        yield TokenDelta(request_id=request_id, tokens=(), finish="error", error=failure)

    async def stats(self) -> list[EngineStats]:
        """See `EngineClient.stats`; at most STATS_MAX_AGE_S old."""
        async with self._stats_lock:
            if self._clock() >= self._stats_until:
                self._stats = await self._calls.stats()
                self._stats_until = self._clock() + STATS_MAX_AGE_S
            return self._stats

    async def flush_cache(self) -> list[FlushOutcome]:
        """See `EngineClient.flush_cache`."""
        return await self._calls.flush_cache()

    async def _attempt(self, request: GenerateRequest, client_id: str) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of one call. Raises EngineRefused or _EngineFailed; closing it cancels the call."""
        stream = self._inbox.open(request.request_id)
        call = self._calls.generate(msgspec.msgpack.encode(request))
        call.add_done_callback(lambda _: stream.changed.set())
        ended_at: float | None = None
        try:
            while True:
                # First what there is, then the wait: `take` clears the event that the call's end has set, too.
                delta = stream.take(client_id)
                if delta is not None:
                    yield delta
                    if delta.finish is not None:
                        return
                    continue
                if stream.broken is not None:
                    raise _EngineFailed(stream.broken)
                remaining_s: float | None = None
                if call.done():
                    summary = _outcome(call)
                    if summary.finish in ("error", "abort"):
                        yield TokenDelta(request_id=client_id, tokens=(), finish=summary.finish, error=summary.error)
                        return
                    ended_at = self._clock() if ended_at is None else ended_at
                    remaining_s = ended_at + LAST_TOKENS_TIMEOUT_S - self._clock()
                    if remaining_s <= 0:
                        raise _EngineFailed("the call ended but its last tokens did not arrive")
                await _wait(stream.changed, remaining_s)
        finally:
            self._inbox.close(request.request_id)
            if not call.done():
                call.cancel()


class _EngineFailed(Exception):
    """The engine that ran a request is lost, or tokens of it are."""


def _outcome(call: "asyncio.Future[bytes]") -> GenerateSummary:
    if call.cancelled():
        raise _EngineFailed("the call was cancelled by Serve")
    error = call.exception()
    if error is not None:
        raise _EngineFailed(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    answer = msgspec.msgpack.decode(call.result(), type=EngineAnswer)
    if answer.refusal is not None:
        raise EngineRefused(answer.refusal)
    assert answer.summary is not None
    return answer.summary


def _already_finished(delivered: list[int], sampling: SamplingParams) -> str | None:
    """How the tokens delivered before a failure already ended the request, if they did."""
    if not delivered:
        return None
    if delivered[-1] in sampling.stop_token_ids and len(delivered) >= sampling.min_tokens:
        return "stop"
    return "length" if len(delivered) >= sampling.max_tokens else None


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
