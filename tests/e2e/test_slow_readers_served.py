"""Clients that ask for long answers and read them late, at a whole server with HAProxy in front: what each takes in
every process, whether a neighbour's tokens come as before, and that a late reader finds its whole answer.

AERIE_SLOW_READERS: how many; the ranks are scripted, so that the engine writes thousands of answers in minutes. Only
late readers of the last minute find their answers: when HAProxy has written one and closes, the kernel keeps the unread
rest, and resets a connection whose client reads nothing for a few minutes.
"""

import asyncio
import contextlib
import json
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from aerie.deploy.serve.environment import silence_limit_s, use_haproxy
from aerie.workers.scheduling.plan import SamplingParams
from tests.e2e.checkpoint import make_tokenizer
from tests.e2e.serving import Server, engine_stats, ray_cluster, serving, wait_idle
from tests.support.scripted import VOCABULARY, scripted_output
from tests.support.tiny_models import make_target

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]

READERS = int(os.environ.get("AERIE_SLOW_READERS", 300))
NUM_TOKENS = 400  # some 90 KB of events, more than what the ingress buffers of an unread answer
MAX_KB = 250  # of one reader in HAProxy, ingress and coordinator together
AT_ONCE = 50  # readers that ask together
QUEUED = 100  # requests that may wait while others ask, so that a neighbour waits for tokens, not for the queue
STEP_MS = 10.0  # of the scripted ranks; the rest is the host's
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_tokenizer(make_target(folder / "target", vocab_size=VOCABULARY), VOCABULARY)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2 * READERS + 600:
        pytest.skip(f"this process may have {limits[1]} open files, and HAProxy needs {2 * READERS + 600}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    before = dict(os.environ)
    haproxy = Path(tempfile.mkdtemp(prefix="h"))  # short, since HAProxy's sockets below it have long names
    use_haproxy(haproxy, silence_limit_s(3600), print)
    args: dict[str, Any] = {
        "model": {"path": "target", "device": "cpu"},
        "scheduler": {"max_running": 64},
        "ingress": {"request_timeout_s": 3600},
    }
    try:
        with ray_cluster() as port, serving(port, args, folder, scripted=True) as running:
            yield running
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(haproxy)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _body(server: Server, seed: int) -> dict[str, Any]:
    wanted = {"max_tokens": NUM_TOKENS, "seed": seed, "stream": True, "return_token_ids": True, "ignore_eos": True}
    return {"model": server.model, "prompt": PROMPT, "temperature": 1.0} | wanted


async def _ask(server: Server, seed: int) -> socket.socket:
    """A client that has asked and does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", server.port))
    body = json.dumps(_body(server, seed))
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    await loop.sock_sendall(client, f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return client


async def _read(client: socket.socket) -> list[int]:
    """Return all tokens of an unread answer."""
    loop, answer = asyncio.get_running_loop(), bytearray()
    async with asyncio.timeout(60):
        while raw := await loop.sock_recv(client, 1 << 16):
            answer += raw
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    lines = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
    assert b"data: [DONE]" in body, body[-300:]
    return _tokens(json.loads(line[6:]) for line in lines)


def _tokens(events: Iterable[Any]) -> list[int]:
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"] or ()]


def _expected(seed: int) -> list[int]:
    return scripted_output(len(PROMPT), SamplingParams(max_tokens=NUM_TOKENS, seed=seed))


async def _neighbour(server: Server, ending: asyncio.Event) -> list[float]:
    """Gaps in milliseconds between the events of one answer after the other."""
    gaps: list[float] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        while not ending.is_set():
            events, last = [], None
            async with client.stream("POST", "/v1/completions", json=_body(server, 0)) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        gaps += [] if last is None else [1000 * (now - last)]
                        last = now
                        events.append(json.loads(line[6:]))
            assert _tokens(events) == _expected(0)
    return gaps


async def _gaps(server: Server, seconds: float) -> list[float]:
    ending = asyncio.Event()
    task = asyncio.ensure_future(_neighbour(server, ending))
    await asyncio.sleep(seconds)
    ending.set()
    return await task


def _num_steps() -> int:
    scheduler = engine_stats()[0].scheduler
    assert scheduler is not None
    return scheduler.num_steps


def _memory_mb() -> dict[str, float]:
    """Private memory of the processes that requests pass."""
    found: dict[str, float] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            name = " ".join(process.cmdline())
            for part, words in (("haproxy", "haproxy.cfg"), ("ingress", ":Ingress"), ("coordinator", "::EagleCoord")):
                if words in name:
                    found[part] = found.get(part, 0.0) + process.memory_full_info().uss / 2**20
    return found


def _say(name: str, gaps: list[float]) -> None:
    p50, p99, most = (float(np.quantile(gaps, share)) for share in (0.5, 0.99, 1.0))
    print(f"{name}: {len(gaps)} gaps, p50 {p50:.1f}, p99 {p99:.1f}, longest {most:.0f} ms", flush=True)


async def test_late_readers_take_bounded_memory_and_find_their_answers(server: Server) -> None:
    alone = await _gaps(server, 5)
    _say("alone", alone)
    before, began_s = _memory_mb(), time.monotonic()
    steps_before = _num_steps()
    ending = asyncio.Event()
    neighbour = asyncio.ensure_future(_neighbour(server, ending))
    clients: list[socket.socket] = []
    try:
        while len(clients) < READERS:
            clients += [await _ask(server, 1 + len(clients) + i) for i in range(min(AT_ONCE, READERS - len(clients)))]
            while engine_stats()[0].num_waiting > QUEUED:
                await asyncio.sleep(0.05)
            if len(clients) % 1000 == 0:
                print(f"{len(clients)} after {time.monotonic() - began_s:.0f} s: {_memory_mb()}", flush=True)
        asked_s = time.monotonic() - began_s
        ending.set()
        beside = await neighbour
        await asyncio.to_thread(wait_idle, 120)
        took_s = time.monotonic() - began_s
        memory = _memory_mb()
        each_kb = {part: 1024 * (memory[part] - before[part]) / READERS for part in before}
        print(f"{READERS} readers asked in {asked_s:.0f} s, written after {took_s:.0f} s, {each_kb} KB each")
        num_steps = _num_steps() - steps_before
        print(f"{num_steps} steps of {1000 * took_s / num_steps:.1f} ms")
        _say("beside them", beside)
        after = await _gaps(server, 5)
        _say("with all of them unread", after)
        assert set(before) == {"haproxy", "ingress", "coordinator"}, before
        assert sum(each_kb.values()) < MAX_KB, each_kb
        limit_ms = 2 * float(np.median(alone)) + 2 * STEP_MS
        assert np.median(after) < limit_ms and np.quantile(after, 0.99) < 10 * limit_ms
        chosen = range(max(0, READERS - 300), READERS, 6)
        for index in chosen:
            assert await _read(clients[index]) == _expected(1 + index), f"reader {index}"
        print(f"{len(chosen)} late readers found their whole answers")
    finally:
        ending.set()
        neighbour.cancel()
        for client in clients:
            client.close()
    deadline_s = time.monotonic() + 30
    while (left := _memory_mb()) and left["ingress"] > before["ingress"] + 60 + 0.02 * READERS:
        assert time.monotonic() < deadline_s, f"memory that was {before} stays at {left}"
        await asyncio.sleep(0.5)
    print(f"after they left: {left}")
    assert server.health()[0] == 200
