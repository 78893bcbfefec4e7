"""How much one ingress carries: bursts of streams, bounded by memory and not by their number."""

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from aerie.cluster.http.admission import STREAM_BYTES, TOKEN_BYTES
from aerie.cluster.http.config import EdgeConfig
from aerie.cluster.ingress.deployment import edge_config as of_ingress
from aerie.cluster.transport.messages import TokenDelta
from aerie.workers.scheduling.plan import SamplingParams
from tests.support.edge_client import PROMPT, TEXT, in_process, served
from tests.support.fake_engine import FakeEngine, Script, Step, says


def _released_together(gate: asyncio.Event, expected: int, engine: list[FakeEngine]) -> Script:
    """Nothing is answered before `expected` requests are there."""

    def script(prompt: list[int], sampling: SamplingParams) -> Iterable[Step]:
        while not gate.is_set():
            if engine[0].num_active == expected:
                gate.set()
            yield 0.05
        for _ in range(3):
            yield TokenDelta("", (98,))
        yield TokenDelta("", (98,), finish="length")

    return script


async def _stream(url: str, seen: Counter[str]) -> None:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(PROMPT | {"stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read(-1)
    writer.close()
    seen[answer.split(b" ", 2)[1].decode() + ("" if b"[DONE]" in answer else " broken")] += 1


@pytest.mark.parametrize("num_streams", [600, pytest.param(2000, marks=pytest.mark.slow)])
async def test_streams_that_come_at_once_all_end_well(num_streams: int) -> None:
    engines: list[FakeEngine] = []
    engine = FakeEngine(_released_together(asyncio.Event(), num_streams, engines))
    engines.append(engine)
    seen: Counter[str] = Counter()
    async with served(engine) as url:
        await asyncio.gather(*(_stream(url, seen) for _ in range(num_streams)))
    assert seen == {"200": num_streams}
    assert engine.max_active == num_streams and engine.num_active == 0


async def test_prompts_in_flight_are_bounded_by_their_memory() -> None:
    engine = FakeEngine(says("a", "b", delay_s=0.1))
    request = PROMPT | {"prompt": [98] * 100}
    room = 3 * (STREAM_BYTES + 100 * TOKEN_BYTES)
    async with in_process(engine, max_pending_bytes=room) as client:
        replies = await asyncio.gather(*(client.post(TEXT, json=request) for _ in range(5)))
        assert sorted(reply.status_code for reply in replies) == [200, 200, 200, 429, 429]
        busy = next(reply for reply in replies if reply.status_code == 429).json()["error"]
        assert busy["message"] == (
            f"The server is busy: bodies and prompts of 3 generations in flight take {room} of {room} bytes"
        )
        assert (await client.post(TEXT, json=request)).status_code == 200


async def test_bodies_that_are_read_are_bounded_by_their_memory() -> None:
    """Uploads that pause with most of their body sent, which none of them is refused for alone."""
    engine = FakeEngine(says("x"))
    go_on = asyncio.Event()
    async with in_process(engine, max_pending_bytes=250_000) as client:
        app: Any = client._transport.app  # type: ignore[attr-defined]

        async def upload() -> int:
            status: list[int] = []
            parts = [json.dumps(PROMPT).encode() + b" " * 100_000, b" "]

            async def receive() -> dict[str, Any]:
                if len(parts) == 1:
                    await go_on.wait()
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)} if parts else {}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    status.append(message["status"])

            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": headers, "query_string": b""}
            await app(scope, receive, send)
            return status[0]

        uploads = [asyncio.ensure_future(upload()) for _ in range(4)]
        done, _ = await asyncio.wait(uploads, return_when=asyncio.FIRST_COMPLETED, timeout=5.0)
        await asyncio.sleep(0.05)
        go_on.set()
        assert sorted(await asyncio.gather(*uploads)) == [200, 200, 429, 429]
        assert done and app.state.admission.num_bytes == 0


def test_an_ingress_carries_what_its_open_files_allow() -> None:
    config = EdgeConfig()
    assert of_ingress(config, 20_000).max_concurrent_requests == 15_000
    own = dataclasses.replace(config, max_concurrent_requests=300)
    assert of_ingress(own, 20_000).max_concurrent_requests == 300
    assert of_ingress(config, 64).max_concurrent_requests == config.max_choices
