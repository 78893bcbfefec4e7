"""Placement of an engine's processes: bundles, strategy and order of ranks, as plain values. No Ray here.

Bundle 0 holds the engine replica and its coordinator, bundles 1.. one worker each. With STRICT_SPREAD, where every
bundle is on a node of its own, bundle 0 holds a worker too.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aerie.cluster.config import AerieConfig, ConfigError

PlacedStrategy = Literal["STRICT_PACK", "PACK", "STRICT_SPREAD"]

ENGINE_CPUS = 0.1  # for each of replica and coordinator, which mostly wait on sockets
WORKER_CPUS = 0.5  # logical: lets two workers and the rest fit on a two-core machine
RESOURCES: dict[str, dict[str, float]] = {"cpu": {"CPU": WORKER_CPUS}, "cuda": {"CPU": WORKER_CPUS, "GPU": 1.0}}


@dataclass(frozen=True)
class NodeResources:
    """Resources of one node. capability: (major, minor) of its GPUs; None if unknown."""

    node_id: str
    address: str
    cpus: float
    gpus: float
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Placement:
    """One engine's placement group, and the device its workers use."""

    device: Literal["cpu", "cuda"]
    bundles: tuple[dict[str, float], ...]
    strategy: PlacedStrategy

    @property
    def uses_gpus(self) -> bool:
        return any("GPU" in bundle for bundle in self.bundles)


@dataclass(frozen=True)
class RankLocation:
    """Node, process and device of a rank.

    device: the device it computes on, for reports.
    visible_devices: the GPUs that its process sees, see `aerie.cluster.environment.visible_devices`.
    is_prestarted: its process was started before Ray, see `aerie.cluster.replica.rank_process`.
    """

    rank: int
    node_id: str
    address: str
    pid: int
    device: str
    visible_devices: str | None
    is_prestarted: bool = False

    @property
    def process(self) -> str:
        """Return the process's location, for reports."""
        return f"pid {self.pid} on node {self.address}"


def place(config: AerieConfig, nodes: Sequence[NodeResources]) -> Placement:
    """Return the placement of each engine replica. "auto" is STRICT_PACK if all replicas fit so, else PACK, which keeps
    an engine on one node if possible.

    Raises ConfigError, with the cluster's totals, if the replicas can never fit, unless `parallel.autoscaling` permits
    waiting for new nodes."""
    parallel = config.parallel
    device = choose_device(config, nodes)
    worker = RESOURCES[device]
    bundles = _bundles(worker, parallel.tensor_parallel, parallel.strategy)
    whole_engine = {key: sum(bundle.get(key, 0.0) for bundle in bundles) for key in worker}
    strategy = (
        parallel.strategy if parallel.strategy != "auto" else _auto_strategy(bundles, whole_engine, config, nodes)
    )
    if not parallel.autoscaling:
        placed = _count_engines(bundles, strategy, nodes)
        if placed < parallel.min_replicas:
            raise ConfigError(_no_room(config, placed, strategy, whole_engine, nodes))
    return Placement(device=device, bundles=bundles, strategy=strategy)


def _bundles(worker: Mapping[str, float], num_ranks: int, strategy: str) -> tuple[dict[str, float], ...]:
    """Return the resources of an engine's placement group: the engine's own CPUs, then each rank's."""
    engine = {"CPU": 2 * ENGINE_CPUS}
    workers = [dict(worker) for _ in range(num_ranks)]
    if strategy == "STRICT_SPREAD":
        workers[0]["CPU"] += engine["CPU"]
        return tuple(workers)
    return (engine, *workers)


def _auto_strategy(
    bundles: Sequence[Mapping[str, float]],
    whole_engine: Mapping[str, float],
    config: AerieConfig,
    nodes: Sequence[NodeResources],
) -> PlacedStrategy:
    """Return the strategy that "auto" stands for: STRICT_PACK, with each engine on one node, if as many of the wanted
    engines fit so as with PACK; else PACK, which may divide an engine among nodes. With autoscaling, where nodes may be
    added: STRICT_PACK if any node has room for a whole engine.

    bundles: resources of an engine's placement group.
    whole_engine: their sum.
    """
    if config.parallel.autoscaling:
        return "STRICT_PACK" if any(_holds(node, whole_engine) for node in nodes) else "PACK"
    strict = _count_engines(bundles, "STRICT_PACK", nodes)
    wanted = min(config.parallel.min_replicas, _count_engines(bundles, "PACK", nodes))
    return "STRICT_PACK" if strict and strict >= wanted else "PACK"


def choose_device(config: AerieConfig, nodes: Sequence[NodeResources]) -> Literal["cpu", "cuda"]:
    """Resolve model.device: "auto" uses GPUs if the cluster has any."""
    gpus = sum(node.gpus for node in nodes)
    wanted = config.model.device
    if wanted == "auto":
        return "cuda" if gpus >= 1 else "cpu"
    if wanted == "cuda" and gpus < 1 and not config.parallel.autoscaling:
        raise ConfigError(f"model.device='cuda': {describe_cluster(nodes)}; set it to 'auto' or 'cpu', or add GPUs")
    return wanted


def order_ranks(bundle_nodes: Mapping[int, str], num_ranks: int, addresses: Mapping[str, str]) -> list[int]:
    """Return the bundle of each rank. Ray guarantees no order, so bundles are sorted: the coordinator's node (bundle 0)
    first, then the other nodes by address, because hosts with neighbouring addresses are usually close.

    bundle_nodes: node id of every bundle.
    addresses: address of each node id; nodes without an address come last."""
    first = bundle_nodes[0]

    def node_order(node: str) -> tuple[bool, bool, int, str]:
        own, start = _number(addresses.get(node)), _number(addresses.get(first))
        return node != first, own < start, own, node

    workers = sorted(bundle_nodes)[-num_ranks:]
    return sorted(workers, key=lambda bundle: (node_order(bundle_nodes[bundle]), bundle))


def _number(address: str | None) -> int:
    try:
        return int(ipaddress.ip_address(address or ""))
    except ValueError:
        return 2**128


def describe_cluster(nodes: Sequence[NodeResources]) -> str:
    """Return a clause with the cluster's totals."""
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    per_node = ", ".join(f"{node.address}: {node.cpus:g} CPU {node.gpus:g} GPU" for node in nodes[:8])
    count = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}"
    return f"the cluster has {count} with {cpus:g} CPU and {gpus:g} GPU in all ({per_node})"


def _holds(node: NodeResources, need: Mapping[str, float]) -> bool:
    return node.cpus >= need.get("CPU", 0.0) and node.gpus >= need.get("GPU", 0.0)


def _count_engines(
    bundles: Sequence[Mapping[str, float]],
    strategy: str,
    nodes: Sequence[NodeResources],
) -> int:
    """Return the number of engines that fit on empty nodes, by first fit; with STRICT_SPREAD, the emptiest nodes come
    first."""
    free = [[node.cpus, node.gpus] for node in nodes]
    whole = [sum(bundle.get(key, 0.0) for bundle in bundles) for key in ("CPU", "GPU")]
    needs = [[bundle.get("CPU", 0.0), bundle.get("GPU", 0.0)] for bundle in bundles]
    count, limit = 0, int(sum(node.cpus for node in nodes) / max(whole[0], 1e-9)) + 1
    while count < limit and _take([whole] if strategy == "STRICT_PACK" else needs, free, strategy == "STRICT_SPREAD"):
        count += 1
    return count


def _take(needs: Sequence[Sequence[float]], free: list[list[float]], spread: bool) -> bool:
    """Subtract each of `needs`, CPUs and GPUs, from a node's room. spread: each from another node."""
    left = sorted(free, key=lambda room: (-room[1], -room[0])) if spread else list(free)
    for need in needs:
        room = next((room for room in left if room[0] >= need[0] and room[1] >= need[1]), None)
        if room is None:
            return False
        room[0] -= need[0]
        room[1] -= need[1]
        if spread:
            left = [other for other in left if other is not room]
    return True


def _no_room(
    config: AerieConfig,
    placed: int,
    strategy: str,
    whole_engine: Mapping[str, float],
    nodes: Sequence[NodeResources],
) -> str:
    """Return the error for a cluster without room for the configured engines. placed: engines that fit; whole_engine:
    resources that one needs."""
    parallel = config.parallel
    needs = " and ".join(f"{amount:g} {key}" for key, amount in whole_engine.items())
    where = {
        "STRICT_PACK": " on one node (STRICT_PACK)",
        "STRICT_SPREAD": f" on {config.parallel.tensor_parallel} nodes (STRICT_SPREAD)",
    }.get(strategy, "")
    if placed == 0:
        remedy = "lower parallel.tensor_parallel, add nodes"
        if where:
            remedy += ", or set parallel.strategy to PACK"
        return (
            f"parallel.tensor_parallel={parallel.tensor_parallel}: an engine needs {needs}{where}, but "
            f"{describe_cluster(nodes)}; {remedy}, or set parallel.autoscaling if nodes will come"
        )
    return (
        f"parallel.replicas={parallel.min_replicas}: only {placed} fit; each needs {needs}{where}, and "
        f"{describe_cluster(nodes)}; lower it to {placed}, add nodes, or set parallel.autoscaling if more come"
    )
