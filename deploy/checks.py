"""Checks of a configuration and its checkpoints, without a cluster; `aerie plan`. Imports torch, which takes over a
second, so commands import this module only where they need it."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.checkpoints import check_checkpoints, check_device, engine_layout, lacking_weights
from cluster.config import AerieConfig, ConfigError, parse, read_args
from cluster.environment import set_process_environment
from cluster.logs import print_line
from cluster.placement import NodeResources, choose_device, place
from cluster.plan import Plan, resolve, resolve_rank
from cluster.replica.plan_report import plan_lines
from cluster.replica.rank_process import start_ranks
from cluster.start_log import StartLog
from deploy.config.files import PACKAGED
from deploy.config.hub import with_downloads
from deploy.nodes import LocalGpus, local_nodes


def checked(args: Mapping[str, Any], base: Path = PACKAGED, need_weights: bool = True) -> AerieConfig:
    """Return the checked configuration. Checkpoints named by hub names are downloaded, and all are read and matched
    (`cluster.checkpoints.check_checkpoints`). base: folder of relative paths. Raises ConfigError."""
    config = parse(with_downloads(args, base), base)
    check_checkpoints(config, need_weights)
    return config


def planned(args: Mapping[str, Any], nodes: Sequence[NodeResources], base: Path = PACKAGED) -> Plan:
    """Return the checked plan of an application on a cluster of `nodes`. base: as in `checked`. Raises ConfigError."""
    config = parse(with_downloads(args, base), base)
    max_model_len = check_checkpoints(config)
    check_devices(config, nodes)
    return resolve(config, max_model_len, nodes)


def checked_file(path: Path, need_weights: bool = True) -> AerieConfig:
    """Check a Serve config file."""
    return checked(read_args(path), path.resolve().parent, need_weights)


def print_plan(path: Path, nodes: Sequence[NodeResources]) -> int:
    """Print the plan of `path` on `nodes`; without nodes, only check what does not depend on nodes. A folder without
    weights is planned from its config.json. Raises ConfigError."""
    config = checked_file(path, need_weights=False)
    check_devices(config, nodes)
    _print_plan(path, config, nodes, print)
    if lacking := lacking_weights(config):
        print(f"not checked {', '.join(lacking)}: no weight files yet; a start needs them")
    return 0


def check_and_start_ranks(
    path: str,
    config: AerieConfig,
    gpus: Callable[[], LocalGpus] | None,
    ranks: str,
    tell: Callable[[int], None],
) -> None:
    """Run `print_plan` for `aerie serve` on this machine. Raises ConfigError only before it calls `tell`.

    path: path of `config`.
    gpus: GPUs of this machine; None: the nodes are not known yet.
    ranks: folder for the sockets of an engine's ranks, which are started once the configuration is checked; "": start
        none.
    tell: called with the result of `check_checkpoints` before the plan is printed, which takes seconds on GPUs."""
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
        _start_ranks(config, max_model_len, nodes, Path(ranks))
        log.done("ranks started")
    tell(max_model_len)
    _print_plan(path, config, nodes, print_line)


def check_devices(config: AerieConfig, nodes: Sequence[NodeResources]) -> None:
    """Refuse a configuration that cannot start on these nodes' devices, or, without nodes, on any device
    (`cluster.checkpoints.check_device`). Raises ConfigError."""
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
    if not nodes:
        report(f"{path} is valid; whether it fits is for the cluster to say")
        return
    placement = place(config, nodes)
    for line in plan_lines(config, placement, nodes, *engine_layout(config, placement.device)):
        report(line)


def _start_ranks(config: AerieConfig, max_model_len: int, nodes: Sequence[NodeResources], folder: Path) -> None:
    """Start the ranks of one engine. If that fails, their actors build them."""
    try:
        start_ranks(resolve_rank(config, max_model_len, choose_device(config, nodes)), folder)
    except (OSError, RuntimeError) as error:
        print_line(f"ranks are not started before Ray: {error}")
