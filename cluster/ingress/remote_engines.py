"""The ingress's way to the engines: one Serve call per request, tokens on one ZeroMQ socket, statistics by name.

`RemoteEngines` implements `cluster.http.engine_client.EngineClient`. Serve and Ray are handed in as `EngineCalls`, so
that this module runs in tests without a cluster.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

from cluster.http.engine_client import EngineRefused
from cluster.ingress.refreshed import Refreshed
from cluster.transport.messages import (
    EngineAnswer,
    EngineStats,
    FlushOutcome,
    GenerateRequest,
    GenerateSummary,
    Probe,
    Refusal,
    TokenBatch,
    TokenDelta,
)
from workers.scheduling.plan import PromptLogprobs, SamplingParams, TokenLogprobs, pack_i32

logger = logging.getLogger(__name__)

STATS_MAX_AGE_S = 0.5
PROBE_MAX_AGE_S = 1.0
HEALTH_WAIT_S = 0.4  # for news, before what is known is answered
PROBE_LIMIT_S = 4.0  # then a request sent now would not get through either
TAKEN_TIMEOUT_S = 4.0  # between a call's start and the news that an engine has queued it, which takes milliseconds
NEW_ATTEMPTS = 2  # to find an engine that takes a new request
RESUMED_ATTEMPTS = 3  # to bring one to its end that an engine had taken
LAST_TOKENS_TIMEOUT_S = 5.0  # between the end of a call and its last tokens, which travel on another way


class EngineCalls(Protocol):
    """What the client needs from Serve and Ray."""

    def generate(self, payload: bytes) -> "asyncio.Future[bytes]":
        """Start one unary call on some engine; cancelling the future cancels the call."""
        ...

    def probe(self, payload: bytes) -> "asyncio.Future[bytes]":
        """The same for a `Probe`."""
        ...

    async def stats(self) -> list[EngineStats]:
        """Statistics of every engine that is known, within a time limit."""
        ...

    async def flush_cache(self) -> list[FlushOutcome]:
        """Have every engine that is known empty its prefix cache, within a time limit."""
        ...


class _Stream:
    """Tokens of one request that its reader has not taken yet: everything that arrives meanwhile is one delta, so a
    slow reader costs its own tokens' memory and no queue can overflow.

    source: the coordinator that has taken it.
    """

    def __init__(self) -> None:
        self.source: str | None = None
        self.changed = asyncio.Event()
        self.broken: str | None = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._of_prompt: list[PromptLogprobs] = []
        self._drafted: list[bool] = []
        self._last: TokenDelta | None = None

    def put(self, delta: TokenDelta) -> None:
        self._tokens.extend(delta.tokens)
        self._logprobs.extend(delta.logprobs or ())
        self._of_prompt.extend(delta.prompt_logprobs)
        self._drafted.extend(delta.drafted)
        self._last = delta
        self.changed.set()

    def fail(self, reason: str) -> None:
        self.broken = reason
        self.changed.set()

    def take(self, request_id: str) -> TokenDelta | None:
        """Everything since the last call as one delta, or None."""
        last, self._last = self._last, None
        self.changed.clear()
        if last is None or (last.finish is None and not self._tokens and not self._of_prompt):
            return None  # nothing, or the news that it is queued
        tokens, self._tokens = tuple(self._tokens), []
        logprobs, self._logprobs = tuple(self._logprobs), []
        of_prompt, self._of_prompt = tuple(self._of_prompt), []
        drafted, self._drafted = tuple(self._drafted), []
        return msgspec.structs.replace(
            last,
            request_id=request_id,
            tokens=tokens,
            logprobs=logprobs or None,
            prompt_logprobs=of_prompt,
            drafted=drafted,
        )


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
        self._resume = resume
        self._clock = clock
        self._stats = Refreshed(calls.stats, STATS_MAX_AGE_S, clock)
        self._probed = Refreshed(self._probe, PROBE_MAX_AGE_S, clock)
        self._num_probes = 0

    async def generate(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        request_id: str,
        running_stats: bool = False,
        token_origins: bool = False,
    ) -> AsyncGenerator[TokenDelta, None]:
        """See `EngineClient.generate`."""
        delivered: list[int] = []
        failure = ""
        was_taken = False
        for attempt in itertools.count():
            if attempt >= (RESUMED_ATTEMPTS if was_taken else NEW_ATTEMPTS) or (was_taken and not self._resume):
                break
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
                token_origins=token_origins,
                resumed=was_taken,
            )
            call = self._calls.generate(msgspec.msgpack.encode(request))
            try:
                async with contextlib.aclosing(
                    self._attempt(call, request.request_id, request_id, waits=was_taken)
                ) as deltas:
                    async for delta in deltas:
                        delivered.extend(delta.tokens)
                        yield delta if attempt == 0 else msgspec.structs.replace(delta, attempt=attempt)
                        if delta.finish is not None:
                            return
            except EngineRefused as refused:
                if not delivered:
                    raise
                failure = f"the engine failed and no other took the request over: {refused}"
                break
            except _EngineFailed as failed:
                failure = str(failed)
                was_taken = was_taken or failed.had_taken
                logger.warning("request %s lost its engine after %d tokens: %s", request_id, len(delivered), failure)
        if not was_taken:
            raise EngineRefused(Refusal("not_ready", failure, TAKEN_TIMEOUT_S))
        yield TokenDelta(request_id=request_id, tokens=(), finish="error", error=failure)

    async def stats(self) -> list[EngineStats]:
        """See `EngineClient.stats`; at most STATS_MAX_AGE_S old."""
        return await self._stats.newest()

    async def health(self) -> tuple[list[EngineStats], str]:
        """See `EngineClient.health`."""
        await asyncio.gather(self._stats.refresh(HEALTH_WAIT_S), self._probed.refresh(HEALTH_WAIT_S))
        engines = self._stats.last or []
        waiting_s = self._probed.waiting_s
        if waiting_s > PROBE_LIMIT_S:
            return engines, f"no engine has answered a probe for {waiting_s:.1f} s"
        return engines, "the first probe is under way" if self._probed.last is None else self._probed.last

    async def flush_cache(self) -> list[FlushOutcome]:
        """See `EngineClient.flush_cache`."""
        return await self._calls.flush_cache()

    async def _probe(self) -> str:
        """Send a probe the way of a request; returns why it did not get through, or ""."""
        self._num_probes += 1
        probe = Probe(f"probe-{self._reply_to}-{self._num_probes}", self._reply_to)
        call = self._calls.probe(msgspec.msgpack.encode(probe))
        try:
            async with contextlib.aclosing(self._attempt(call, probe.request_id, probe.request_id)) as deltas:
                async for delta in deltas:
                    return "" if delta.finish == "stop" else f"a probe ended with {delta.finish}: {delta.error}"
        except EngineRefused as refused:
            return refused.refusal.message
        except _EngineFailed as failed:
            return str(failed)
        return "a probe ended without an answer"

    async def _attempt(
        self, call: "asyncio.Future[bytes]", call_id: str, client_id: str, waits: bool = False
    ) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of one call. waits: until an engine has restarted, if need be. Raises EngineRefused or _EngineFailed;
        closing it cancels the call."""
        stream = self._inbox.open(call_id)
        call.add_done_callback(lambda _: stream.changed.set())
        taken_by_s = math.inf if waits else self._clock() + TAKEN_TIMEOUT_S
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
                    raise _EngineFailed(stream.broken, had_taken=True)
                remaining_s: float | None = None
                if stream.source is None and taken_by_s < math.inf:
                    remaining_s = taken_by_s - self._clock()
                    if remaining_s <= 0 and not call.done():
                        raise _EngineFailed(f"no engine took it within {TAKEN_TIMEOUT_S:g} s", had_taken=False)
                if call.done():
                    summary = _outcome(call)
                    if summary.finish in ("error", "abort"):
                        yield TokenDelta(request_id=client_id, tokens=(), finish=summary.finish, error=summary.error)
                        return
                    ended_at = self._clock() if ended_at is None else ended_at
                    remaining_s = ended_at + LAST_TOKENS_TIMEOUT_S - self._clock()
                    if remaining_s <= 0:
                        raise _EngineFailed("the call ended but its last tokens did not arrive", had_taken=True)
                await _wait(stream.changed, remaining_s)
        finally:
            self._inbox.close(call_id)
            if not call.done():
                call.cancel()


class _EngineFailed(Exception):
    """The engine that ran a request is lost, or tokens of it are. had_taken: it was queued there, or on its way when
    the engine failed; else no engine has been heard of."""

    def __init__(self, reason: str, had_taken: bool) -> None:
        super().__init__(reason)
        self.had_taken = had_taken


def _outcome(call: "asyncio.Future[bytes]") -> GenerateSummary:
    """How a call ended that is done."""
    if call.cancelled():
        raise _EngineFailed("the call was cancelled by Serve", had_taken=True)
    error = call.exception()
    if error is not None:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise _EngineFailed(reason, had_taken=True)
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
