"""Sends each request to a chosen engine, and to another one if that engine fails: `RemoteEngines` implements
`aerie.cluster.http.engine_client.EngineClient`. Statistics and the health probe are cached (`Refreshed`), and callers
may limit their wait for new ones. Uses Ray through `EngineCalls`, so that tests need none."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from aerie.cluster.http.engine_client import EngineRefused
from aerie.cluster.ingress.attempts import Attempts, EngineFailed
from aerie.cluster.ingress.engine_links import EngineLinks
from aerie.cluster.ingress.routing import Prompt
from aerie.cluster.transport.admin import AdminCall, AdminOutcome, LoadLora, UnloadLora
from aerie.cluster.transport.messages import EngineStats, FlushOutcome, GenerateRequest, Probe, TokenDelta
from aerie.workers.prompt_inputs import PromptInputs
from aerie.workers.scheduling.plan import SamplingParams, pack_i32
from aerie.workers.scheduling.request import Owner

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Refreshed(Generic[T]):
    """A value at most `max_age_s` old. One fetch runs at a time, in the caller's event loop.

    last: the last result of `fetch`; None before the first.
    """

    def __init__(self, fetch: Callable[[], Awaitable[T]], max_age_s: float, clock: Callable[[], float]) -> None:
        self.last: T | None = None
        self._fetch = fetch
        self._max_age_s = max_age_s
        self._clock = clock
        self._fetched_s = float("-inf")
        self._started_s = 0.0
        self._task: asyncio.Task[T] | None = None

    @property
    def waiting_s(self) -> float:
        """Seconds that the current fetch has been running; 0 without one."""
        return 0.0 if self._task is None else self._clock() - self._started_s

    async def refresh(self, wait_s: float) -> None:
        """Fetch the value if it is too old. Wait at most `wait_s`; the fetch continues after that."""
        if self._task is not None or self._is_old():
            await asyncio.wait((self._fetching(),), timeout=wait_s)

    async def newest(self) -> T:
        """Return a value that is not too old, however long the fetch takes. Raises what `fetch` raises."""
        if self._task is None and self.last is not None and not self._is_old():
            return self.last
        return await asyncio.shield(self._fetching())

    def _is_old(self) -> bool:
        return self._clock() >= self._fetched_s + self._max_age_s

    def _fetching(self) -> "asyncio.Task[T]":
        """Return the current fetch, or a new one."""
        if self._task is None:
            self._started_s = self._clock()
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(_log_failure)
        return self._task

    async def _run(self) -> T:
        try:
            self.last = await self._fetch()
            self._fetched_s = self._clock()
            return self.last
        finally:
            self._task = None


def _log_failure(task: "asyncio.Task[T]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a cached value could not be fetched again", exc_info=task.exception())


STATS_MAX_AGE_S = 0.5  # age from which statistics are asked for again
PROBE_MAX_AGE_S = 1.0  # age from which engines are probed again
HEALTH_WAIT_S = 0.4  # maximum wait for new statistics before older ones are returned
MEET_PERIOD_S = 0.05  # between checks whether a probe has arrived
STUCK_PERIOD_S = 1.0  # between checks whether a request's engine is stuck
PROBE_LIMIT_S = 4.0  # a probe fails after this, as a request would
TAKEN_TIMEOUT_S = 4.0  # for an engine to confirm that it has queued a request, which takes milliseconds
NEW_WAIT_S = 8.0  # maximum wait of a new request for an engine that accepts requests


class EngineCalls(Protocol):
    """Calls to all engines at once."""

    async def stats(self) -> list[EngineStats]:
        """Statistics of every known engine, within a time limit."""
        ...

    async def administer(self, call: AdminCall) -> list[AdminOutcome]:
        """Let every known engine do what an administrator asks."""
        ...

    async def flush_cache(self) -> list[FlushOutcome]:
        """Empty the prefix cache of every known engine, within a time limit."""
        ...


class RemoteEngines:
    """EngineClient over ZeroMQ.

    resume: continue a request on another engine if its engine fails.
    resume_wait_s: maximum wait for that engine.
    """

    def __init__(
        self,
        engines: EngineLinks,
        calls: EngineCalls,
        resume: bool,
        resume_wait_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._calls = calls
        self._resume = resume
        self._resume_wait_s = resume_wait_s
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
        output: Sequence[int] = (),
        owner: Owner = Owner(),  # noqa: B008 - immutable
        inputs: PromptInputs | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """See `EngineClient.generate`. A full queue accepts a request that has output, because its client already has a
        part of the answer."""
        attempts = Attempts()
        attempts.delivered.extend(output)
        known = Prompt(prompt, sampling.cache_salt, sampling.adapter)
        packed = pack_i32(prompt)
        while not attempts.is_over:
            if attempts.was_taken and not self._resume:
                break
            if finish := attempts.finish(sampling):
                yield TokenDelta(request_id=request_id, tokens=(), finish=finish)
                return
            name = await self._choose(attempts, known)
            if name is None:
                break
            attempt = attempts.num_attempts  # 0: the first
            request = GenerateRequest(
                request_id=request_id if attempt == 0 else f"{request_id}~{attempt}",
                prompt=packed,
                sampling=sampling,
                output=pack_i32(attempts.delivered),
                running_stats=running_stats,
                token_origins=token_origins,
                resumed=attempts.was_taken or bool(output),
                num_crashes=attempts.num_crashes,
                owner=owner,
                inputs=inputs,
            )
            async with contextlib.aclosing(self._attempt(attempts, name, request, known, request_id)) as deltas:
                async for delta in deltas:
                    attempts.delivered.extend(delta.tokens)
                    yield delta if attempt == 0 else msgspec.structs.replace(delta, attempt=attempt)
                    if delta.finish is not None:
                        return
        if not attempts.was_taken or (attempts.refusal is not None and not attempts.delivered):
            raise EngineRefused(attempts.as_refusal())
        yield TokenDelta(request_id=request_id, tokens=(), finish="error", error=attempts.failure)

    async def stats(self) -> list[EngineStats]:
        """Return the statistics of every known engine, at most STATS_MAX_AGE_S old."""
        return await self._stats.newest()

    async def health(self) -> tuple[list[EngineStats], str]:
        """See `EngineClient.health`."""
        await asyncio.gather(self._stats.refresh(HEALTH_WAIT_S), self._probed.refresh(HEALTH_WAIT_S))
        engines = self._stats.last or []
        waiting_s = self._probed.waiting_s
        if waiting_s > PROBE_LIMIT_S:
            return engines, f"no engine has answered a probe for {waiting_s:.1f} s"
        return engines, "the first probe is under way" if self._probed.last is None else self._probed.last

    async def wait_for_probe(self, limit_s: float) -> None:
        """Wait until a probe has succeeded, so that the first request finds the connections open. Waits at most
        `limit_s`, and only while an engine is ready."""
        deadline_s = self._clock() + limit_s
        while self._clock() < deadline_s:
            engines, fault = await self.health()
            if not fault or not any(engine.status == "ready" for engine in engines):
                return
            await asyncio.sleep(MEET_PERIOD_S)

    def adapters(self) -> dict[str, str]:
        """Return the folders of the LoRA adapters that an engine has, by name."""
        return self._engines.adapters()

    async def administer(self, call: AdminCall) -> list[AdminOutcome]:
        """See `EngineClient.administer`."""
        if isinstance(call, LoadLora | UnloadLora):
            call = self._engines.adapter_changes.stamped(call)
        return await self._calls.administer(call)

    async def flush_cache(self) -> list[FlushOutcome]:
        """See `EngineClient.flush_cache`."""
        return await self._calls.flush_cache()

    async def _probe(self) -> str:
        """Send a probe on the path of requests. Return why it failed, or ""."""
        attempts, prompt = Attempts(), Prompt((), b"")
        while not attempts.is_over and (name := await self._choose(attempts, prompt)) is not None:
            self._num_probes += 1
            probe = Probe(f"probe-{self._num_probes}")
            async with contextlib.aclosing(self._attempt(attempts, name, probe, prompt, probe.request_id)) as deltas:
                async for delta in deltas:
                    return "" if delta.finish == "stop" else f"a probe ended with {delta.finish}: {delta.error}"
        return attempts.as_refusal().message

    async def _choose(self, attempts: Attempts, prompt: Prompt) -> str | None:
        """Return the engine for the next attempt; None if no engine may accept the request."""
        avoid, refusal = frozenset(attempts.avoid), attempts.refusal
        wait_s = self._resume_wait_s if attempts.was_taken else NEW_WAIT_S
        if avoid and (refusal is None or refusal.kind != "leaving"):
            wait_s = 0.0  # try another engine, or else return this refusal, without waiting
        name = await self._engines.choose(prompt, avoid, wait_s)
        if name is None and avoid and refusal is None:  # engines that gave no reason may accept the request by now
            return await self._engines.choose(prompt, frozenset(), 0.0)
        return name

    async def _attempt(
        self, attempts: Attempts, name: str, message: GenerateRequest | Probe, prompt: Prompt, client_id: str
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas of one engine. Record its failure, refusal or timeout in `attempts`. Closing this generator
        closes the stream."""
        attempts.num_attempts += 1
        is_request = isinstance(message, GenerateRequest)
        taken_by_s = math.inf if attempts.was_taken else self._clock() + TAKEN_TIMEOUT_S
        stream = self._engines.start(name, message, prompt)
        try:
            while True:
                # Take before waiting: `take` also clears the event that a failure has set.
                delta = stream.take(client_id)
                if delta is not None:
                    yield delta
                    if delta.finish is not None:
                        return
                    continue
                if stream.failure is not None:
                    raise stream.failure
                remaining_s = STUCK_PERIOD_S
                if not stream.is_taken and taken_by_s < math.inf:
                    remaining_s = taken_by_s - self._clock()
                    if remaining_s <= 0:
                        raise EngineFailed(f"no engine took it within {TAKEN_TIMEOUT_S:g} s", had_taken=False)
                if self._resume and is_request and self._engines.is_stuck(name):
                    raise EngineFailed(f"engine {name} has run nothing for a while", had_taken=True, is_hung=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(remaining_s):
                        await stream.changed.wait()
        except EngineRefused as refused:
            attempts.record_refusal(name, refused.refusal)
        except EngineFailed as failed:
            failed.num_crashes = stream.num_crashes
            attempts.record_failure(name, failed)
            if not failed.had_taken:
                self._engines.suspect(name)
            if is_request:
                num_delivered = len(attempts.delivered)
                logger.warning("request %s lost its engine after %d tokens: %s", client_id, num_delivered, failed)
        finally:
            stream.close()
