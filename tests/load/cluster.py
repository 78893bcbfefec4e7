"""Ray and `aerie serve` on the nodes of `tests.load.network`, and their processes by what they are for.

A process belongs to the node whose network namespace it is in, whatever its parent.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from aerie.cluster.replica.rank_process import NAME
from aerie.deploy.config.files import find_config
from tests.bench.served import GROUPS
from tests.load import gpus
from tests.load.network import Network, address, namespace
from tests.load.scenario import Fault, Hosts
from tests.load.verdict import Usage
from tests.support.embedded import read_config_file

PORT = 8000
RAY_PORT = 6379
NODE_LIMIT_S = 60.0
UPDATE_LIMIT_S = 180.0
_ENVIRONMENT = {
    "RAY_AUTH_TOKEN": "0" * 32,  # of a cluster that nobody else can reach
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}


@dataclass
class Cluster:
    """serve: the process of `aerie serve`. engine_node: see `Fault`; 0 until it is asked for.

    consoles: by process, for a report of what went wrong."""

    network: Network
    hosts: Hosts
    folder: Path
    serve: "subprocess.Popen[bytes] | None" = None
    engine_node: int = 0
    consoles: list[Path] = field(default_factory=list)

    def start(self) -> None:
        """All nodes, then `aerie serve`; returns before it serves."""
        for node, cpus in enumerate(self.hosts.cpus or (0,), start=1):
            self.network.add_node(node, node in self.hosts.wired)
            if self.hosts.cpus is not None:
                self.start_ray(node, cpus)
        config = self._write_config(self.hosts.args)
        joins = [] if self.hosts.cpus is None else ["--address", f"{address(1)}:{RAY_PORT}"]
        self.serve = self._run(1, "serve", str(config), *joins)

    def update(self, args: Mapping[str, Any]) -> None:
        """Deploys the application with other arguments on the Serve that runs; returns when it is told. Raises
        RuntimeError if that fails."""
        config = self._write_config(_merged(self.hosts.args, args))
        code = "from ray.serve.scripts import cli; cli()"
        words = [sys.executable, "-c", code, "run", "--non-blocking", "--address", "auto", str(config)]
        done = subprocess.run(
            [*self._on(1), *words],
            env=self._environment(1),
            capture_output=True,
            text=True,
            timeout=UPDATE_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"serve run: {done.stdout[-1000:]}{done.stderr[-2000:]}")

    def join(self, node: int, cpus: int) -> None:
        """One node more."""
        if not Path(f"/run/netns/{namespace(node)}").exists():
            self.network.add_node(node, node in self.hosts.wired)
        self.start_ray(node, cpus)

    def start_ray(self, node: int, cpus: int) -> None:
        """`aerie start` on a node; returns when its raylet runs."""
        role = ["--head", "--port", str(RAY_PORT)] if node == 1 else ["--address", f"{address(1)}:{RAY_PORT}"]
        own = ["--node-ip", address(node), "--num-cpus", str(cpus), "--object-store-mb", "80", "--block"]
        if self.hosts.gpus:
            own += ["--num-gpus", str(gpus.num_gpus(self.hosts, node))]
        started = self._run(node, "start", *role, *own)
        deadline = time.monotonic() + NODE_LIMIT_S
        while not self.find(node, "raylet"):
            if started.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"node {node}: Ray did not start: {self.consoles[-1].read_text()[-2000:]}")
            time.sleep(0.1)

    def node_of(self, fault: Fault) -> int:
        """Where to do it. Raises RuntimeError if it is the engine's node and there is no engine."""
        if fault.node:
            return fault.node
        if not self.engine_node:
            nodes = range(1, len(self.hosts.cpus or (0,)) + 1)
            self.engine_node = max((node for node in nodes if self.find(node, "coordinator")), default=0)
        if not self.engine_node:
            raise RuntimeError(f"{fault}: no node has a coordinator")
        return self.engine_node

    def find(self, node: int, part: str) -> list[psutil.Process]:
        """Processes of `part` on a node, oldest first. "": all of the node's."""
        processes = list(self._processes(node))
        if part == "worker" and any(found == "rank" for _, found in processes):
            part = "rank"  # started ahead: its actor is only its proxy
        return [process for process, found in processes if part in ("", found)]

    def usage(self) -> dict[str, Usage]:
        """Return the usage of each part of the server on all nodes."""
        found: dict[str, Usage] = {}
        for name in os.listdir("/run/netns"):
            if name.startswith("n"):
                for process, part in self._processes(int(name[1:])):
                    with contextlib.suppress(psutil.Error):
                        own = Usage(process.memory_full_info().pss / 1e6, process.num_fds())
                        found[part] = found.get(part, Usage()) + own
        return found

    def kill_all(self) -> None:
        """SIGKILL to every process on every node."""
        for name in os.listdir("/run/netns"):
            if name.startswith("n"):
                self.kill_node(int(name[1:]))

    def kill_node(self, node: int) -> None:
        """SIGKILL to every process there, until there is none."""
        deadline = time.monotonic() + 10
        while (left := self.find(node, "")) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)

    def left_behind(self) -> list[str]:
        """Command lines of processes that live on any node."""
        names = [name for name in os.listdir("/run/netns") if name.startswith("n")]
        found = [process for name in names for process in self.find(int(name[1:]), "")]
        lines = []
        for process in found:
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(process.cmdline())[:120])
        return lines

    def _environment(self, node: int) -> dict[str, str]:
        # A folder of the scenario's own: in a shared one Ray would look for the cluster of the scenario before.
        own = gpus.node_environment(self.hosts, node, gpus.visible_gpus(os.environ) if self.hosts.gpus else [])
        return os.environ | _ENVIRONMENT | {"RAY_TMPDIR": str(self.folder)} | own

    def _on(self, node: int) -> list[str]:
        """Return what comes before a command that is to run on a node."""
        name = namespace(node)
        return ["ip", "netns", "exec", name, *gpus.host_name(self.hosts, name, sys.executable)]

    def _write_config(self, args: Mapping[str, Any]) -> Path:
        config = self.folder / "load.yaml"
        content = serve_content(self.hosts, args)
        config.write_text(yaml.safe_dump(content))
        return config

    def _processes(self, node: int) -> Iterator[tuple[psutil.Process, str]]:
        own = os.stat(f"/run/netns/{namespace(node)}").st_ino
        for process in sorted(psutil.process_iter(), key=lambda each: each.create_time()):
            with contextlib.suppress(psutil.Error, OSError):
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino == own and process.status() != psutil.STATUS_ZOMBIE:
                    yield process, _part(process)

    def _run(self, node: int, command: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """`aerie COMMAND` on a node, in a process group of its own."""
        console = self.folder / f"{command}-{node}-{len(self.consoles)}.log"
        self.consoles.append(console)
        words = [*self._on(node), sys.executable, "-m", "aerie.deploy.cli", command, *arguments]
        environment = self._environment(node)
        with console.open("wb") as out:
            return subprocess.Popen(
                words, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )


def _part(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    program = os.path.basename(line.split(" ")[0]) if line else ""
    if program == "raylet":
        return "raylet"
    if process.name().startswith(NAME):
        return "rank"
    if line.startswith("ray::WorkerActor") and not line.startswith("ray::WorkerActor.run"):
        return "spare"
    return next((name for marker, name in GROUPS if marker in line), "other")


def serve_content(hosts: Hosts, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the embedded pair's Serve config file with the scenario's changes."""
    content = read_config_file(find_config("eagle"))
    content["proxy_location"] = hosts.proxy_location
    content["http_options"] = {"host": "0.0.0.0", "port": PORT}
    application = content["applications"][0]
    application["args"] = _merged(application["args"], changes)
    return content


def _merged(args: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """args with sections whose keys are replaced one by one."""
    changed = {
        section: {**args.get(section, {}), **values} if isinstance(values, Mapping) else values
        for section, values in changes.items()
    }
    return {**args, **changed}


def signal_part(processes: list[psutil.Process], number: signal.Signals) -> list[int]:
    """Sends it; pids that got it."""
    reached = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
            reached.append(process.pid)
    return reached
