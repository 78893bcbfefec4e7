"""Checks of a configuration and its checkpoints, without a cluster; `aerie plan`."""

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import AerieConfig, ConfigError, parse, read_args, set_process_environment
from cluster.logs import print_line
from cluster.placement import NodeResources, choose_device, place
from cluster.plan import Plan, resolve, resolve_rank
from cluster.replica.plan_report import plan_lines
from cluster.start_log import StartLog
from deploy.config.files import PACKAGED
from deploy.config.hub import with_downloads


def checked(args: Mapping[str, Any], base: Path = PACKAGED, need_weights: bool = True) -> AerieConfig:
    """The configuration, its checkpoints read and matched too (`cluster.checkpoints.check_checkpoints`), after they are
    downloaded where they are named by their names on the hub. base: where relative paths start. Raises ConfigError."""
    return _read(args, base, need_weights)[0]


def planned(args: Mapping[str, Any], nodes: Sequence[NodeResources], base: Path = PACKAGED) -> Plan:
    """The plan of an application on a cluster of `nodes`, everything checked. base: as for `checked`. Raises
    ConfigError."""
    config, max_model_len = _read(args, base)
    check_devices(config, nodes)
    return resolve(config, max_model_len, nodes)


def _read(args: Mapping[str, Any], base: Path, need_weights: bool = True) -> tuple[AerieConfig, int]:
    """The configuration, and what `check_checkpoints` finds."""
    from cluster.checkpoints import check_checkpoints

    config = parse(with_downloads(args, base), base)
    return config, check_checkpoints(config, need_weights)


def checked_file(path: Path, need_weights: bool = True) -> AerieConfig:
    """The same of a Serve config file."""
    return checked(read_args(path), path.resolve().parent, need_weights)


def local_nodes(count: int, cpus: float | None, gpus: float | None) -> list[NodeResources]:
    """`count` nodes like this machine, or with the CPUs and GPUs given."""
    cpus = float(os.cpu_count() or 1) if cpus is None else cpus
    capability = None
    if gpus is None:
        here = counted_gpus()()
        gpus, capability = float(here.count), here.capability
    return [NodeResources(f"node{n}", f"node{n}", cpus, gpus, capability) for n in range(count)]


def cluster_nodes() -> list[NodeResources]:
    """What the nodes of the Ray cluster that are alive have in all."""
    import ray

    return [
        NodeResources(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def print_plan(path: Path, nodes: Sequence[NodeResources]) -> int:
    """Print what `path` would start on `nodes`; without nodes, only check what needs none. A folder that holds no
    weights yet is planned by its config.json. Raises ConfigError."""
    from cluster.checkpoints import lacking_weights

    config = checked_file(path, need_weights=False)
    check_devices(config, nodes)
    _print_plan(path, config, nodes, print)
    if lacking := lacking_weights(config):
        print(f"not checked {', '.join(lacking)}: no weight files yet; a start needs them")
    return 0


def check_and_begin(
    path: str,
    config: AerieConfig,
    gpus: "Callable[[], LocalGpus] | None",
    ranks: str,
    tell: Callable[[int], None],
) -> None:
    """`print_plan` for `aerie serve`, on this machine. path: of `config`. gpus: of this machine; None: the nodes are
    not known yet. ranks: a folder for the sockets of an engine's ranks, which are begun as soon as the configuration is
    found right; "": none are. tell: called before the plan is printed, which takes seconds on GPUs, with what
    `check_checkpoints` found. Raises ConfigError, if at all, before that."""
    from cluster.checkpoints import check_checkpoints

    log = StartLog("check")
    log.done("torch imported")
    set_process_environment(config.engine.threads_per_worker)
    max_model_len = check_checkpoints(config)
    nodes = []
    if gpus is not None:
        here = gpus()
        nodes = [dataclasses.replace(node, capability=here.capability) for node in local_nodes(1, None, here.count)]
    check_devices(config, nodes)
    log.done("checkpoints read")
    if nodes and ranks:
        _begin_ranks(config, max_model_len, nodes, Path(ranks))
        log.done("ranks begun")
    tell(max_model_len)
    _print_plan(path, config, nodes, print_line)


def check_devices(config: AerieConfig, nodes: Sequence[NodeResources]) -> None:
    """Refuse what could not start on these nodes' devices, as far as that is known (see `check_device` in
    `cluster.checkpoints`); without nodes, what could start on none. Raises ConfigError."""
    from cluster.checkpoints import check_device

    if nodes:
        known = {node.capability for node in nodes}
        capability = known.pop() if len(known) == 1 else None
        check_device(config, place(config, nodes).device, capability, here=capability is not None)
    elif config.model.device != "auto":
        check_device(config, config.model.device)
    else:
        try:
            check_device(config, "cuda")
        except ConfigError as error:
            with contextlib.suppress(ConfigError):
                check_device(config, "cpu")
                return
            raise error from None


def _print_plan(
    path: str | Path, config: AerieConfig, nodes: Sequence[NodeResources], report: Callable[[str], None]
) -> None:
    from cluster.checkpoints import engine_layout

    if not nodes:
        report(f"{path} is valid; whether it fits is for the cluster to say")
        return
    placement = place(config, nodes)
    for line in plan_lines(config, placement, nodes, *engine_layout(config, placement.device)):
        report(line)


def _begin_ranks(config: AerieConfig, max_model_len: int, nodes: Sequence[NodeResources], folder: Path) -> None:
    """Begin the ranks of one engine. Where they cannot be, their actors build them."""
    from cluster.replica.rank_process import begin_ranks

    try:
        begin_ranks(resolve_rank(config, max_model_len, choose_device(config, nodes)), folder)
    except (OSError, RuntimeError) as error:
        print_line(f"ranks are not begun before Ray has started: {error}")


@dataclass(frozen=True)
class LocalGpus:
    """The GPUs of this machine. capability: (major, minor) of all, None if there are none, or several kinds."""

    count: int
    capability: tuple[int, int] | None = None

    @staticmethod
    def listed(text: str) -> "LocalGpus":
        """Of nvidia-smi's lines, a compute capability each."""
        found = [match for line in text.splitlines() if (match := re.fullmatch(r"(\d+)\.(\d+)", line.strip()))]
        kinds = {(int(match[1]), int(match[2])) for match in found}
        return LocalGpus(len(found), kinds.pop() if len(kinds) == 1 else None)


def counted_gpus() -> Callable[[], LocalGpus]:
    """Begin to count; the function waits for the result."""
    if shutil.which("nvidia-smi") is None:
        return lambda: LocalGpus(0)
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    counting = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    return lambda: LocalGpus.listed(counting.communicate(timeout=30)[0])
