"""Limits of the system: open files, memory of a rank, Ray's processes.

pytest -s -m slow tests/e2e/test_resource_limits.py
"""

import asyncio
import collections
import os
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.serve_process import ServeProcess, assert_nothing_left, body, serve_process, until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STREAMS = 400
CGROUPS = Path("/sys/fs/cgroup/memory")


@pytest.mark.parametrize("open_files", [256, 1024])
async def test_streams_beyond_the_open_files_are_refused_and_none_is_reset(tmp_path: Path, open_files: int) -> None:
    """The hard limit, too, so that the start cannot raise it."""
    with serve_process(tmp_path, before=("sh", "-c", f'ulimit -n {open_files}; exec "$@"', "sh")) as server:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=150, limits=limits) as client:
            ends = collections.Counter(await asyncio.gather(*(_ending(client) for _ in range(STREAMS))))
        print(open_files, dict(ends))
        assert ends["whole"] > 10 and not set(ends) - {"whole", "503", "429"}, (ends, server.log.read_text())
        assert server.status("/health") == 200 and server.complete(3).status_code == 200


async def _ending(client: httpx.AsyncClient) -> str:
    """How a stream ended."""
    text = ""
    try:
        async with client.stream("POST", "/v1/completions", json=body(4) | {"stream": True}) as reply:
            if reply.status_code != 200:
                return str(reply.status_code)
            async for part in reply.aiter_text():
                text += part
    except httpx.HTTPError as error:
        return f"{type(error).__name__} after {len(text)}"
    return "whole" if text.endswith("data: [DONE]\n\n") else "cut"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> "object":
    with serve_process(tmp_path_factory.mktemp("serve")) as running:
        yield running


def _streamed(server: ServeProcess, max_tokens: int, meanwhile: threading.Event) -> tuple[str, str]:
    """The text of a stream and its last line; `meanwhile` is set once it has begun."""
    text, line = "", ""
    asked = body(max_tokens) | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=120) as stream:
        for line in filter(None, stream.iter_lines()):
            if line.startswith("data: {"):
                event = httpx.Response(200, text=line.removeprefix("data: ")).json()
                text += "".join(choice["text"] for choice in event.get("choices", ()))
                meanwhile.set()
    return text, line


class _Stream(threading.Thread):
    """A stream in a thread, begun when this is made."""

    def __init__(self, server: ServeProcess, max_tokens: int) -> None:
        super().__init__()
        self.ended = ("", "")
        self._server = server
        self._max_tokens = max_tokens
        self._begun = threading.Event()
        self.start()
        assert self._begun.wait(60)

    def run(self) -> None:
        self.ended = _streamed(self._server, self._max_tokens, self._begun)


def test_a_rank_that_is_killed_for_its_memory_is_replaced_and_no_token_lost(server: ServeProcess) -> None:
    """A control group of its own, whose limit the next pages exceed; needs root and version 1 of control groups."""
    group = CGROUPS / f"aerie-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group: {error}")
    try:
        expected, _ = _streamed(server, 600, threading.Event())
        rank = next(process for process in server.below() if process.name().startswith("aerie-rank"))
        stream = _Stream(server, 600)
        (group / "memory.limit_in_bytes").write_text(str(2**20))
        (group / "cgroup.procs").write_text(str(rank.pid))
        long = body(1) | {"prompt": [5 + i % 50 for i in range(1500)]}
        answer = httpx.post(f"{server.url}/v1/completions", json=long, timeout=120)
        until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, 60)
        stream.join(120)
        back_s = until(lambda: server.status("/health") == 200, 60, server.log.read_text)
        print(f"killed for its memory; {answer.status_code}; /health 200 {back_s:.1f} s after the stream's end")
        assert answer.status_code == 200 and stream.ended == (expected, "data: [DONE]")
    finally:
        until(lambda: not (group / "cgroup.procs").read_text().strip(), 30)
        group.rmdir()


@pytest.mark.parametrize("words", ["dashboard/agent", "runtime_env/agent"])
def test_without_an_agent_of_rays_it_ends_with_the_reason_and_leaves_nothing(tmp_path: Path, words: str) -> None:
    """Ray's raylet ends with its agents."""
    with serve_process(tmp_path) as server:
        started = server.below()
        found = server.find(words)
        assert found, sorted({" ".join(process.cmdline())[:120] for process in started})
        for process in found:
            process.kill()
        killed_s = time.monotonic()
        assert server.process.wait(60) == 1
        print(f"ended {time.monotonic() - killed_s:.1f} s after {words} was killed")
        print(server.log.read_text().splitlines()[-1])
        assert "Ray's raylet" in server.log.read_text() and "Traceback" not in server.log.read_text()
        assert_nothing_left(server, started, 5)
