"""Checks that need no cluster: of a configuration and of its checkpoints."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cluster.config import AerieConfig, parse, read_args, set_process_environment
from cluster.replica.placement import NodeResources, place
from cluster.replica.plan_report import plan_lines
from cluster.start_log import StartLog
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


def print_plan(
    path: Path, nodes: Sequence[NodeResources], found_to: Path | None = None, ranks: Path | None = None
) -> int:
    """Print what `path` would start on `nodes`; without nodes, only check what needs none. found_to: a file for what
    only the checkpoints know, see `deploy.configs.use_checked`, which is there once all is printed. ranks: a folder for
    the sockets of ranks, which are begun; this returns when they have ended. Raises ConfigError."""
    if ranks is not None:
        set_process_environment(parse(read_args(path), path.resolve().parent).engine.threads_per_worker)
    from cluster.checkpoints import bytes_per_slot, rank_memory

    log = StartLog("plan") if ranks is not None else None
    if log is not None:
        log.done("GPUs counted")
    config = checked_file(path)
    if log is not None:
        log.done("checkpoints checked")
    if not nodes:
        print(f"{path} is valid; whether it fits is for the cluster to say")
        _write_found(config, found_to)
        return 0
    placement = place(config, nodes)
    has_begun = log is not None and ranks is not None and _begin_ranks(config, placement.device, ranks)
    if log is not None:
        log.done("ranks begun")
    memory = rank_memory(config) if placement.device == "cuda" else None
    for line in plan_lines(config, placement, nodes, bytes_per_slot(config), memory):
        print(line, flush=True)
    _write_found(config, found_to)
    if has_begun:
        from cluster.replica.rank_process import wait_for_ranks

        wait_for_ranks()
    return 0


def _write_found(config: AerieConfig, path: Path | None) -> None:
    if path is not None:
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps({"max_model_len": config.model.max_model_len}))
        unfinished.rename(path)


def _begin_ranks(config: AerieConfig, device: Literal["cpu", "cuda"], folder: Path) -> bool:
    """Begin the ranks of one engine; whether they were. Where they cannot be, their actors build them."""
    from cluster.replica.rank_process import begin_ranks

    model = dataclasses.replace(config.model, device=device)
    try:
        begin_ranks(config.model_copy(update={"model": model}), folder)
    except (OSError, RuntimeError) as error:
        print(f"ranks are not begun before Ray has started: {error}", file=sys.stderr, flush=True)
        return False
    return True


def count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
