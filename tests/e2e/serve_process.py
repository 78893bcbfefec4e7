"""`aerie serve` in a process group of its own, for tests that break it from outside."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from aerie.deploy.config.files import starting_point
from tests.e2e.serving import RAY_ENVIRONMENT, free_port
from tests.load.hostile.priority import NICENESS, outweigh
from tests.support import ROOT

READY_LIMIT_S = 180.0


@dataclass
class ServeProcess:
    """log: what it prints."""

    process: "subprocess.Popen[bytes]"
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def below(self) -> list[psutil.Process]:
        """Every process that it has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def find(self, words: str) -> list[psutil.Process]:
        """Those of them with `words` in the command line."""
        found = []
        for process in self.below():
            with contextlib.suppress(psutil.Error):
                if words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def actors(self, name: str) -> list[psutil.Process]:
        """Those that are Ray actors of class `name`."""
        return [process for process in self.find(f"ray::{name}") if process.cmdline()[0].startswith("ray::")]

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return self.status("/health") == 200

        until(ready, READY_LIMIT_S, self.log.read_text)

    def status(self, path: str, timeout_s: float = 5.0) -> int | None:
        """Return the status of a GET; None without an answer."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}{path}", timeout=timeout_s).status_code
        return None

    def complete(self, max_tokens: int = 20, timeout_s: float = 60.0) -> httpx.Response:
        """A greedy completion, always of the same prompt."""
        return httpx.post(f"{self.url}/v1/completions", json=body(max_tokens), timeout=timeout_s)


def body(max_tokens: int) -> dict[str, Any]:
    return {"model": "target", "prompt": "Count", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def serve_process(
    folder: Path,
    ray_folder: Path | None = None,
    arguments: Sequence[str] = ("my.yaml",),
    before: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    **sections: Any,
) -> Iterator[ServeProcess]:
    """The embedded pair, ready. ray_folder: Ray's, with sessions below it; None: one that is removed afterwards.
    arguments: the command's, beside the port. before: a command that starts it. variables: of its
    environment. sections: keys of those of `args`."""
    port = free_port()
    made = None if ray_folder is not None else tempfile.mkdtemp(prefix="ae", dir="/tmp")
    environment = os.environ | RAY_ENVIRONMENT | {"RAY_TMPDIR": str(ray_folder or made), "PYTHONPATH": str(ROOT)}
    content = yaml.safe_load(starting_point("eagle"))
    args = content["applications"][0]["args"]
    for name, keys in ({"engine": {"drain_timeout_s": 90}} | sections).items():
        args.setdefault(name, {}).update(keys)
    (folder / "my.yaml").write_text(yaml.safe_dump(content))
    log = folder / "log"
    with log.open("wb") as console:
        command = [*before, sys.executable, "-m", "aerie.deploy.cli", "serve", *arguments, "--port", str(port)]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment | dict(variables or {}),
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = ServeProcess(process, port, log)
    started: list[psutil.Process] = []
    try:
        server.wait_ready()
        started = server.below()
        for each in started:
            outweigh(each.pid, NICENESS)
        yield server
    finally:
        if process.poll() is None:
            started += server.below()
            process.kill()
        for each in started:
            with contextlib.suppress(psutil.Error):
                each.kill()
        process.wait()
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def until(reached: Callable[[], bool], limit_s: float, describe: Callable[[], str] = lambda: "") -> float:
    """Waits; returns how long it took in seconds."""
    started = time.monotonic()
    while not reached():
        assert time.monotonic() - started < limit_s, f"not within {limit_s} s: {describe()}"
        time.sleep(0.05)
    return time.monotonic() - started


def assert_nothing_left(server: ServeProcess, started: list[psutil.Process], limit_s: float) -> None:
    _, alive = psutil.wait_procs(started, timeout=limit_s)
    assert not alive, [process.cmdline() for process in alive]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", server.port))
