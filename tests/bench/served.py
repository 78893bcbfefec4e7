"""A server as a child process: started as `make serve` starts it, its console with times, ended with Ctrl-C."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.e2e.serving import RAY_ENVIRONMENT, free_port
from tests.support import ROOT
from tests.support.embedded import read_config_file

READY_LIMIT_S = 180.0
STOP_LIMIT_S = 120.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

# What a process's command line begins with or holds -> its group; the first that fits.
GROUPS = (
    ("ray::ServeReplica:aerie:Ingress", "ingress"),
    ("ray::ServeReplica:aerie:Engine", "engine"),
    ("ray::EagleCoordinator", "coordinator"),
    ("ray::WorkerActor", "worker"),
    ("aerie.deploy.serve.check_process", "rank, check"),
    ("haproxy.cfg", "proxy"),
    ("ray::HAProxyManager", "proxy's manager"),
    ("ray::ProxyActor", "Python proxy"),
    ("ray::ServeController", "controller"),
    ("raylet", "Ray"),
    ("gcs_server", "Ray"),
    ("ray", "Ray"),
)


@dataclass
class RunningServer:
    """lines: (seconds since the start, line) of its console. ready_s: from the start to the first 200 of /health."""

    process: subprocess.Popen[str]
    url: str
    started_s: float
    started_at_s: float = field(default_factory=time.time)  # the same as Unix time
    lines: list[tuple[float, str]] = field(default_factory=list)
    ready_s: float = 0.0

    def groups(self) -> dict[str, list[psutil.Process]]:
        """Its processes by what they are for."""
        found: dict[str, list[psutil.Process]] = {"launcher": [psutil.Process(self.process.pid)]}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found.setdefault(_group(" ".join(child.cmdline())), []).append(child)
        return found

    def cpu_seconds(self) -> Counter[str]:
        """Core seconds that each group has used."""
        used: Counter[str] = Counter()
        for name, processes in self.groups().items():
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    used[name] += times.user + times.system
        return used

    def console(self) -> str:
        return "\n".join(f"{seconds:6.1f} {line}" for seconds, line in self.lines)


@contextlib.contextmanager
def running(
    module: str,
    content: dict[str, Any],
    *options: str,
    ready_limit_s: float = READY_LIMIT_S,
    python_path: Sequence[Path] = (),
) -> Iterator[RunningServer]:
    """`python -m module serve-config options` on a free port of the loopback; nothing of it is left afterwards.

    content: the Serve config file; its port is filled in. python_path: folders that its processes import from first.
    Raises RuntimeError if it does not start, or does not end within two minutes of Ctrl-C, with its console's text."""
    folder = tempfile.mkdtemp(prefix="ab", dir="/tmp")  # short: Unix socket paths end at 107 bytes
    port = free_port()
    content = content | {"http_options": {"host": "127.0.0.1", "port": port}}
    path = Path(folder) / "serve.yaml"
    path.write_text(yaml.safe_dump(content))
    paths = os.pathsep.join(filter(None, (*map(str, python_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | RAY_ENVIRONMENT | _own_ports() | {"RAY_TMPDIR": folder, "PYTHONPATH": paths}
    started_s, started_at_s = time.perf_counter(), time.time()
    verbose = ["--verbose"] if module == "aerie.deploy.cli serve" else []  # Ray's and Serve's lines too
    process = subprocess.Popen(
        [sys.executable, "-m", *module.split(), str(path), *options, *verbose],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
    )
    server = RunningServer(process, f"http://127.0.0.1:{port}", started_s, started_at_s)
    reader = threading.Thread(target=_read, args=(server,), daemon=True)
    reader.start()
    try:
        _wait_ready(server, ready_limit_s)
        yield server
    finally:
        left = interrupt(server)
        reader.join(5)
        assert process.stdout is not None
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)
    if left:
        raise RuntimeError(f"Ctrl-C left behind: {left}\n{server.console()}")


def _own_ports() -> dict[str, str]:
    """Serve's ports beside that of HTTP are the same for all servers of a machine (Ray 2.60) unless told otherwise."""
    names = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")
    return {name: str(free_port()) for name in names}


def model_name(server: RunningServer) -> str:
    """The name that its clients ask for."""
    name: str = httpx.get(f"{server.url}/v1/models", timeout=10).json()["data"][0]["id"]
    return name


def embedded_config() -> dict[str, Any]:
    """deploy/eagle.yaml, fit for any folder."""
    return read_config_file(ROOT / "deploy" / "eagle.yaml")


def _wait_ready(server: RunningServer, limit_s: float) -> None:
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=2).status_code == 200:
                server.ready_s = time.perf_counter() - server.started_s
                return
        if server.process.poll() is not None or time.perf_counter() - server.started_s > limit_s:
            raise RuntimeError(f"the server did not start:\n{server.console()}")
        time.sleep(0.1)


def interrupt(server: RunningServer) -> list[str]:
    """Ctrl-C, and wait for the end of all its processes; what had to be killed. Nothing if it has ended."""
    process = server.process
    left: list[str] = []
    children: list[psutil.Process] = []
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
    if process.poll() is None:
        left.append("aerie serve")
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(children, timeout=15)
    for child in alive:
        with contextlib.suppress(psutil.Error):
            left.append(child.name())
            child.kill()
    return left


def _read(server: RunningServer) -> None:
    assert server.process.stdout is not None
    for line in server.process.stdout:
        server.lines.append((time.perf_counter() - server.started_s, _COLOUR.sub("", line.rstrip())))


def _group(command: str) -> str:
    return next((group for part, group in GROUPS if part in command), "other")
