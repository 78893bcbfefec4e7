"""Sends requests and records the times of their answers. Open loop: Poisson arrivals of token ids on /v1/completions,
with greedy answers of a fixed length. Used by `aerie bench` and the benchmarks."""

import asyncio
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from aerie.deploy.bench.arrivals import Arrival, Traffic
from aerie.deploy.bench.figures import Rate, rate_figures
from aerie.deploy.bench.stream_client import Answered, Pool, request_bytes

WARM_UP = 16  # requests of a warm-up, sent at once, twice
LEAD_S = 0.2  # from the start of the clock to the first possible arrival


@dataclass(frozen=True)
class Target:
    """The server under test.

    url: where the application is, without /v1.
    extra: added to every request's body.
    key: the API key, "" for none.
    """

    url: str
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""


Progress = Callable[[int, int], None]  # called at the end of an answer with the numbers of ended and failed ones


def _unwatched(num_ended: int, num_failed: int) -> None:
    pass


async def run_rate(
    target: Target,
    arrivals: Sequence[Arrival],
    drain_s: float,
    progress: Progress = _unwatched,
    request_ids: Sequence[str] = (),
) -> tuple[list[Answered], float]:
    """Send every request when it is due, then wait up to drain_s for answers. Return answers in the order of arrivals,
    and the clock's start.

    request_ids: X-Request-Id of each request (`tests.bench.tracing`); empty: none is sent.
    """
    where = urlsplit(target.url)
    encrypted = where.scheme == "https"
    host, port = where.hostname or "", where.port or (443 if encrypted else 80)
    requests = [
        request_bytes(port, _body(arrival, target), "completions", host, target.key, request_id, where.path)
        for arrival, request_id in zip(arrivals, request_ids or [""] * len(arrivals), strict=True)
    ]
    pool = Pool(host, port, encrypted)
    answers = [Answered() for _ in arrivals]
    tasks: list[asyncio.Task[None]] = []
    ended = failed = 0

    async def ask_one(request: bytes, answered: Answered) -> None:
        nonlocal ended, failed
        await ask(pool, request, answered)
        ended, failed = ended + 1, failed + bool(answered.fault)
        progress(ended, failed)

    begin_s = time.perf_counter() + LEAD_S
    for arrival, request, answered in zip(arrivals, requests, answers, strict=True):
        await asyncio.sleep(max(0.0, begin_s + arrival.due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(ask_one(request, answered)))
    if tasks:
        await asyncio.wait(tasks, timeout=drain_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    pool.close()
    return answers, begin_s


async def warm_up(target: Target, traffic: Traffic, drain_s: float, num_requests: int = WARM_UP) -> None:
    """Send a few requests and discard the answers. Raises RuntimeError with the first fault."""
    arrivals = traffic.arrivals(1000.0)[:num_requests]
    warm = [Arrival(0.0, arrival.prompt, min(64, arrival.num_tokens)) for arrival in arrivals]
    for part in (warm[:1], warm, warm[::-1]):
        answers, _ = await run_rate(target, part, drain_s)
        faults = sorted({answer.fault for answer in answers if answer.fault})
        if faults:
            raise RuntimeError(f"{target.url}: the warm-up failed: {faults[0]}")


async def measure_rate(
    target: Target, traffic: Traffic, rate: float, drain_s: float, progress: Progress = _unwatched
) -> Rate:
    """Send the traffic at one rate and return its figures."""
    arrivals = traffic.arrivals(rate)
    gc.collect()
    gc.disable()  # a garbage collection would count as the server's latency
    try:
        answers, begin_s = await run_rate(target, arrivals, drain_s, progress=progress)
    finally:
        gc.enable()
    return rate_figures(rate, arrivals, answers, begin_s)


async def ask(pool: Pool, request: bytes, answered: Answered) -> None:
    """Send one request, and write its answer, or why there is none, to `answered`."""
    try:
        await pool.ask(request, answered)
    except asyncio.CancelledError:
        answered.fault = "unfinished at the end of the measurement"
        raise
    except (OSError, ValueError) as error:
        answered.fault = f"{type(error).__name__}: {error}"[:300]


def _body(arrival: Arrival, target: Target) -> dict[str, Any]:
    """Return the body of a request to /v1/completions."""
    return {
        "model": target.model,
        "prompt": arrival.prompt,
        "max_tokens": arrival.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
