"""Checks that need no cluster: of a configuration and of its checkpoints."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.config import AerieConfig, parse, read_args
from cluster.replica.placement import NodeResources, place
from cluster.replica.plan_report import plan_lines
from deploy.configs import PACKAGED
from deploy.hub import with_downloads


def checked(args: Mapping[str, Any], base: Path = PACKAGED) -> AerieConfig:
    """The configuration, its checkpoints' config.json files read and matched too, after they are downloaded where they
    are named by their names on the hub. base: where relative paths start. Raises ConfigError."""
    from cluster.checkpoints import with_checkpoints

    return with_checkpoints(parse(with_downloads(args, base), base))


def checked_file(path: Path) -> AerieConfig:
    """The same of a Serve config file."""
    return checked(read_args(path), path.resolve().parent)


def local_nodes(count: int, cpus: float | None, gpus: float | None) -> list[NodeResources]:
    """`count` nodes like this machine, or with the CPUs and GPUs given."""
    cpus = float(os.cpu_count() or 1) if cpus is None else cpus
    gpus = float(count_gpus()) if gpus is None else gpus
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


def count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
