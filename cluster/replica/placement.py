"""Where an engine's processes go: bundles, strategy and the order of ranks, as plain values. No Ray here.

Bundle 0 holds the engine replica and its coordinator, bundles 1.. one worker each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.config import AerieConfig, ConfigError

ENGINE_CPUS = 0.1  # each of replica and coordinator; they sleep on sockets
WORKER_CPUS = 0.5  # logical: lets two workers and the rest fit on a two-core machine


@dataclass(frozen=True)
class NodeResources:
    """What one node of the cluster has in all."""

    node_id: str
    address: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Placement:
    """One engine's placement group, and the device its workers use."""

    device: Literal["cpu", "cuda"]
    bundles: tuple[dict[str, float], ...]
    strategy: Literal["STRICT_PACK", "PACK"]


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs.

    device: what it computes on, for the operator.
    visible_devices: the GPUs that its process sees, see `cluster.config.visible_devices`.
    """

    rank: int
    node_id: str
    address: str
    pid: int
    device: str
    visible_devices: str | None

    @property
    def process(self) -> str:
        """Where to find it, for the operator."""
        return f"pid {self.pid} on node {self.address}"


def place(config: AerieConfig, nodes: Sequence[NodeResources]) -> Placement:
    """The placement of each engine replica. Raises ConfigError, with the cluster's totals, if the replicas can never
    fit (unless `parallel.autoscaling` says that nodes may still come)."""
    parallel = config.parallel
    device = choose_device(config, nodes)
    worker = {"CPU": WORKER_CPUS, "GPU": 1.0} if device == "cuda" else {"CPU": WORKER_CPUS}
    bundles = ({"CPU": 2 * ENGINE_CPUS}, *(dict(worker) for _ in range(parallel.tensor_parallel)))
    whole_engine = {key: sum(bundle.get(key, 0.0) for bundle in bundles) for key in worker}
    one_node = any(_holds(node, whole_engine) for node in nodes)
    strategy: Literal["STRICT_PACK", "PACK"]
    strategy = ("STRICT_PACK" if one_node else "PACK") if parallel.strategy == "auto" else parallel.strategy
    if not parallel.autoscaling:
        placed = _count_engines(bundles, strategy, whole_engine, nodes)
        if placed < parallel.replicas:
            raise ConfigError(_no_room(config, placed, strategy, whole_engine, nodes))
    return Placement(device=device, bundles=bundles, strategy=strategy)


def choose_device(config: AerieConfig, nodes: Sequence[NodeResources]) -> Literal["cpu", "cuda"]:
    """What model.device means in this cluster: "auto" takes GPUs where there are any."""
    gpus = sum(node.gpus for node in nodes)
    wanted = config.model.device
    if wanted == "auto":
        return "cuda" if gpus >= 1 else "cpu"
    if wanted == "cuda" and gpus < 1 and not config.parallel.autoscaling:
        raise ConfigError(f"model.device='cuda': {describe_cluster(nodes)}; set it to 'auto' or 'cpu', or add GPUs")
    return wanted


def order_ranks(bundle_nodes: Mapping[int, str], first: str) -> list[int]:
    """Worker bundle of each rank: bundles of one node are neighbours, those on node `first` (the coordinator's) come
    first. bundle_nodes: node id of every bundle, bundle 0 included. PACK promises neither."""
    nodes = sorted(set(bundle_nodes.values()), key=lambda node: (node != first, node))
    return sorted((b for b in bundle_nodes if b != 0), key=lambda b: (nodes.index(bundle_nodes[b]), b))


def describe_cluster(nodes: Sequence[NodeResources]) -> str:
    """One clause with the cluster's totals."""
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    each = ", ".join(f"{node.address}: {node.cpus:g} CPU {node.gpus:g} GPU" for node in nodes[:8])
    count = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}"
    return f"the cluster has {count} with {cpus:g} CPU and {gpus:g} GPU in all ({each})"


def _holds(node: NodeResources, need: Mapping[str, float]) -> bool:
    return node.cpus >= need.get("CPU", 0.0) and node.gpus >= need.get("GPU", 0.0)


def _count_engines(
    bundles: Sequence[Mapping[str, float]],
    strategy: str,
    whole_engine: Mapping[str, float],
    nodes: Sequence[NodeResources],
) -> int:
    """Engines that fit on empty nodes, first fit."""
    free = [[node.cpus, node.gpus] for node in nodes]

    def take(need: Mapping[str, float]) -> bool:
        for room in free:
            if room[0] >= need.get("CPU", 0.0) and room[1] >= need.get("GPU", 0.0):
                room[0] -= need.get("CPU", 0.0)
                room[1] -= need.get("GPU", 0.0)
                return True
        return False

    needs = [whole_engine] if strategy == "STRICT_PACK" else list(bundles)
    limit = int(sum(node.cpus for node in nodes) / max(whole_engine["CPU"], 1e-9)) + 1
    count = 0
    while count < limit and all(take(need) for need in needs):
        count += 1
    return count


def _no_room(
    config: AerieConfig,
    placed: int,
    strategy: str,
    whole_engine: Mapping[str, float],
    nodes: Sequence[NodeResources],
) -> str:
    parallel = config.parallel
    needs = " and ".join(f"{amount:g} {key}" for key, amount in whole_engine.items())
    where = " on one node (STRICT_PACK)" if strategy == "STRICT_PACK" else ""
    if placed == 0:
        remedy = "lower parallel.tensor_parallel, add nodes"
        if strategy == "STRICT_PACK":
            remedy += ", or set parallel.strategy to PACK"
        return (
            f"parallel.tensor_parallel={parallel.tensor_parallel}: an engine needs {needs}{where}, but "
            f"{describe_cluster(nodes)}; {remedy}, or set parallel.autoscaling if nodes will come"
        )
    return (
        f"parallel.replicas={parallel.replicas}: only {placed} fit; each needs {needs}{where}, and "
        f"{describe_cluster(nodes)}; lower it to {placed}, add nodes, or set parallel.autoscaling if more come"
    )
