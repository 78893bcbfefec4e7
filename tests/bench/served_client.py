"""What benchmarks ask of a running server: its model's name, an empty prefix cache, a load with its latencies."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import httpx

from deploy.bench.stream_client import request_bytes
from tests.bench.sse_client import BODY_END, END, EVENT

FLUSH_TRIES = 3
FLUSH_PAUSE_S = 2.0


async def served_model(client: httpx.AsyncClient, url: str) -> str:
    """The name that clients ask for."""
    models = (await client.get(f"{url}/v1/models")).raise_for_status().json()
    return str(models["data"][0]["id"])


async def flush_cache(client: httpx.AsyncClient, url: str, pause_s: float = FLUSH_PAUSE_S) -> None:
    """Empty the prefix cache, which a server refuses while requests run: the last ones may just be ending.

    Raises RuntimeError with the server's answer after three tries."""
    answer = ""
    for attempt in range(FLUSH_TRIES):
        if attempt:
            await asyncio.sleep(pause_s)
        try:
            reply = await client.post(f"{url}/flush_cache", timeout=30)
        except httpx.HTTPError as error:
            answer = f"{type(error).__name__}: {error}"
            continue
        if reply.status_code == 200:
            return
        answer = f"{reply.status_code}: {reply.text[:300]}"
    raise RuntimeError(f"{url}/flush_cache was tried {FLUSH_TRIES} times; the last answer: {answer}")


@dataclass(frozen=True)
class Timing:
    """One streamed answer: seconds to the first event, from there to the end, and its tokens."""

    first_s: float
    rest_s: float
    num_tokens: int


async def load(
    url: str, prompts: Sequence[dict[str, Any]], concurrency: int, max_tokens: int, **parameters: Any
) -> tuple[list[Timing], float]:
    """Stream `max_tokens` tokens for every prompt, `concurrency` at a time; timings and the seconds it took in all.

    prompts: `prompt` or `messages` of each. parameters: further ones of the requests, `model` among them. Raises
    RuntimeError at the first answer that fails. The answers' bytes are not looked into, so that one core keeps up with
    a fast server."""
    todo = iter(prompts)
    started_s = time.perf_counter()
    base = {"stream": True, "max_tokens": max_tokens, "ignore_eos": True} | parameters
    tasks = [asyncio.create_task(_connection(url, todo, base)) for _ in range(concurrency)]
    try:
        parts = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [timing for part in parts for timing in part], time.perf_counter() - started_s


async def _connection(url: str, todo: Iterator[dict[str, Any]], base: dict[str, Any]) -> list[Timing]:
    """One kept-alive connection's answers, one after another."""
    where = urlsplit(url)
    assert where.hostname is not None and where.port is not None, f"{url}: must name host and port"
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    timings = []
    try:
        for prompt in todo:
            route = "chat/completions" if "messages" in prompt else "completions"
            request = request_bytes(where.port, base | prompt, route, where.hostname)
            sent_s = time.perf_counter()
            writer.write(request)
            first_s, end_s = await _read_answer(reader)
            timings.append(Timing(first_s - sent_s, end_s - first_s, base["max_tokens"]))
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return timings


async def _read_answer(reader: asyncio.StreamReader) -> tuple[float, float]:
    """When the answer's first event and its end came."""
    seen, first_s = b"", 0.0
    while not seen.endswith(END):
        part = await reader.read(1 << 16)
        seen = seen[-len(END) :] + part if first_s else seen + part
        if not first_s and len(seen) > 12 and seen[8:13] != b" 200 ":
            raise RuntimeError(f"a request failed: {seen[:500]!r}")
        if not first_s and EVENT in seen:
            first_s = time.perf_counter()
        if not part or (seen.endswith(BODY_END) and not seen.endswith(END)):
            raise RuntimeError(f"a stream ended without [DONE]: {seen[-500:]!r}")
    return first_s, time.perf_counter()


def load_figures(timings: Sequence[Timing], elapsed_s: float) -> dict[str, float]:
    """Tokens/s of all, and per answer TTFT and TPOT (after the first event's tokens), median and 99th percentile."""
    ttft_ms = sorted(timing.first_s * 1000 for timing in timings)
    tpot_ms = sorted(timing.rest_s * 1000 / max(1, timing.num_tokens - 1) for timing in timings)
    num_tokens = sum(timing.num_tokens for timing in timings)
    return {
        "num_answers": len(timings),
        "output_tokens": num_tokens,
        "elapsed_s": round(elapsed_s, 3),
        "output_tokens_per_s": round(num_tokens / elapsed_s, 1),
        "ttft_ms_median": round(median(ttft_ms), 2),
        "ttft_ms_p99": round(_p99(ttft_ms), 2),
        "tpot_ms_median": round(median(tpot_ms), 3),
        "tpot_ms_p99": round(_p99(tpot_ms), 3),
    }


def _p99(ordered: Sequence[float]) -> float:
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
