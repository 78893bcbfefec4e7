"""A whole Aerie on this machine for tests: Ray, Serve, HTTP on a free port of the loopback."""

import contextlib
import gc
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import psutil

from aerie.cluster.transport.discovery import coordinator_prefix
from aerie.cluster.transport.messages import EngineStats
from aerie.deploy.serve.environment import FAULT_ENVIRONMENT
from aerie.workers.distributed.ports import free_port

if TYPE_CHECKING:
    from aerie.cluster.replica.engine import Engine

START_LIMIT_S = 120.0
END_LIMIT_S = 30.0
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # a cluster of this test's own, on the loopback
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
} | FAULT_ENVIRONMENT


@dataclass(frozen=True)
class Server:
    """Where it listens, its model's name, and the path of its application."""

    port: int
    model: str
    prefix: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.prefix}"

    def health(self) -> tuple[int, dict[str, Any]]:
        answer = httpx.get(f"{self.url}/health", timeout=10)
        return answer.status_code, answer.json()

    def wait_healthy(self, limit_s: float = START_LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if self.health()[0] == 200:
                    return
            assert time.monotonic() < deadline, f"not healthy after {limit_s} s: {self.health()}"
            time.sleep(0.1)


@contextlib.contextmanager
def ray_cluster(num_cpus: int = 6) -> Iterator[int]:
    """A Ray of this test's own with Serve on a free port; nothing is left of it."""
    import ray
    from ray import serve

    folder = tempfile.mkdtemp(prefix="ae", dir="/tmp")  # short: Unix socket paths end at 107 bytes
    os.environ |= RAY_ENVIRONMENT | {"RAY_TMPDIR": folder}
    port = free_port()
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=100 * 10**6,
        namespace="serve",
        log_to_driver=True,
        configure_logging=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield port
        serve.shutdown()
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Ray leaves sockets and subprocesses to the collector
            ray.shutdown()
            gc.collect()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def serving(
    port: int,
    args: dict[str, Any],
    base: Path,
    scripted: bool = False,
    name: str = "aerie",
    prefix: str = "",
    engine_class: "type[Engine] | None" = None,
) -> Iterator[Server]:
    """One application on a running Serve. scripted: its ranks have no model, see `tests.e2e.scripted_rank`.
    engine_class: another engine."""
    from ray import serve

    from aerie.cluster.replica.engine import Engine
    from aerie.deploy.app import application
    from aerie.deploy.checks import planned
    from aerie.deploy.nodes import cluster_nodes
    from tests.e2e.scripted_rank import ScriptedEngine

    plan = planned(args, cluster_nodes(), base)
    chosen = engine_class or (ScriptedEngine if scripted else Engine)
    serve.run(application(plan, chosen), name=name, route_prefix=prefix or "/")
    server = Server(port, plan.ingress.config.served_model_name, prefix)
    try:
        server.wait_healthy()
        yield server
    finally:
        serve.delete(name)
        deadline = time.monotonic() + END_LIMIT_S
        while left := _coordinators(name):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)


def _coordinators(application: str) -> list[str]:
    """Their actors' names."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in named if actor["namespace"] == "aerie"]
    return [name for name in names if name.startswith(coordinator_prefix(application))]


def engine_stats(application: str = "aerie") -> list[EngineStats]:
    """Return what every coordinator of the application says, asked directly."""
    import ray

    names = _coordinators(application)
    raw = ray.get([ray.get_actor(name, namespace="aerie").stats.remote() for name in names], timeout=10)
    return [msgspec.msgpack.decode(each, type=EngineStats) for each in raw]


def wait_idle(limit_s: float = 30.0, application: str = "aerie") -> EngineStats:
    """The one engine's statistics once nothing runs, waits or holds a page."""
    deadline = time.monotonic() + limit_s
    while True:
        (stats,) = engine_stats(application)
        if not (stats.num_running or stats.num_waiting or stats.kv_usage):
            return stats
        assert time.monotonic() < deadline, f"still busy after {limit_s} s: {stats}"
        time.sleep(0.05)


def actor_pids(name: str) -> list[int]:
    """Processes of this test's Ray actors of class `name`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name().startswith(f"ray::{name}"[:15]) and f"ray::{name}" in " ".join(process.cmdline()):
                found.append(process.pid)
    return sorted(found)
