"""Clients that ask for long answers and do not read them: each takes a bounded part of the ingress's memory, gives it
back when it leaves, and disturbs nobody. AERIE_SLOW_READERS: how many."""

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
import uvicorn

from aerie.cluster.transport.messages import TokenDelta
from tests.support.edge_client import PROMPT, TEXT, served
from tests.support.fake_engine import FakeEngine, Step

READERS = int(os.environ.get("AERIE_SLOW_READERS", 200))
NUM_TOKENS = 20_000
MAX_KB = 250  # of one: what uvicorn keeps of an answer (64 KiB), the request's own state, and the client of this test


def script(prompt: list[int], sampling: Any) -> Iterator[Step]:
    if sampling.max_tokens < 100:
        yield TokenDelta("", (5, 6), "length", cached_tokens=0)
    while True:  # more than any buffer takes
        yield TokenDelta("", (5, 6, 7, 8) * 25)
        yield 0.0  # lets others have the loop


async def _ask(port: int) -> socket.socket:
    body = json.dumps(PROMPT | {"stream": True, "max_tokens": NUM_TOKENS}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(client, head.encode() + body)
    return client


async def _until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_clients_that_do_not_read_take_bounded_memory_and_disturb_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = uvicorn.Server.serve

    async def with_small_buffers(self: uvicorn.Server, sockets: list[socket.socket]) -> None:
        sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # of the system: filled in no time
        await serve(self, sockets)

    monkeypatch.setattr(uvicorn.Server, "serve", with_small_buffers)
    engine = FakeEngine(script)
    process = psutil.Process()
    async with served(engine, max_model_len=2 * NUM_TOKENS, max_concurrent_requests=READERS + 200) as url:
        port = int(url.rpartition(":")[2])
        async with httpx.AsyncClient(base_url=url, timeout=60) as other:
            assert (await other.post(TEXT, json=PROMPT | {"max_tokens": 2})).status_code == 200
            before = process.memory_info().rss
            clients = [await _ask(port) for _ in range(READERS)]
            await _until(lambda: engine.num_active == READERS)
            grown, size = READERS * 8192, process.memory_info().rss
            while grown >= READERS * 8192:  # buffers fill as fast as the machine lets them
                await asyncio.sleep(2.0)
                grown, size = process.memory_info().rss - size, process.memory_info().rss
                assert (size - before) / READERS / 1024 < MAX_KB, "it grows"
            print(f"{READERS} slow readers: {(size - before) / READERS / 1024:.0f} KB each")
            assert engine.num_active == READERS, "they are waited for"
            began_s = time.monotonic()
            assert (await other.post(TEXT, json=PROMPT | {"max_tokens": 2})).status_code == 200
            print(f"another request took {time.monotonic() - began_s:.2f} s")
            for client in clients:
                client.close()
            await _until(lambda: engine.num_active == 0)
