"""What a cluster says of itself: nodes, applications with their deployments and engines, and placement groups that wait
for room, with what each lacks. Resources are plain numbers. Read by `aerie.deploy.status.collect`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aerie.deploy.serve.applications import DeploymentStatus

Resources = Mapping[str, float]
_ON_ONE_NODE = ("STRICT_PACK",)
_ON_OWN_NODES = ("STRICT_SPREAD",)


@dataclass(frozen=True)
class NodeRoom:
    """Resources of a living node, by name; in total and free."""

    total: Resources
    free: Resources


def missing(bundles: Sequence[Resources], strategy: str, nodes: Sequence[NodeRoom]) -> str:
    """Return why Ray cannot place `bundles`, in words. strategy: as Ray names it. "" if there is room."""
    wanted = _total(bundles)
    units = [wanted] if strategy in _ON_ONE_NODE else list(bundles)  # what one node must hold
    for unit in units:
        if not any(_fits(unit, node.total) for node in nodes):
            return f"no node has {written(unit)}; the largest {_largest(unit, nodes)}"
    if strategy in _ON_OWN_NODES and len(nodes) < len(bundles):
        return f"needs {len(bundles)} nodes, there are {len(nodes)}"
    total, free = _total([node.total for node in nodes]), _total([node.free for node in nodes])
    short = [name for name, count in wanted.items() if free.get(name, 0) < count - 1e-6]
    if short:
        lacking = [f"{name} {wanted[name]:g}, free {free.get(name, 0):g} of {total.get(name, 0):g}" for name in short]
        return "needs " + "; ".join(lacking)
    for unit in units:
        if not any(_fits(unit, node.free) for node in nodes):
            return f"no node has {written(unit)} free: what is free is on several nodes"
    return ""


def written(resources: Resources) -> str:
    """Return resources in words: "CPU 1, GPU 2"."""
    return ", ".join(f"{name} {count:g}" for name, count in sorted(resources.items()))


def _total(parts: Sequence[Resources]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for resources in parts:
        total.update(resources)
    return dict(total)


def _fits(wanted: Resources, there: Resources) -> bool:
    return all(there.get(name, 0) >= count - 1e-6 for name, count in wanted.items())


def _largest(wanted: Resources, nodes: Sequence[NodeRoom]) -> str:
    largest = {name: max((node.total.get(name, 0) for node in nodes), default=0) for name in wanted}
    return f"has {written(largest)}"


ENGINE = "Engine"  # name of the deployment (`aerie.deploy.app`)
_WAITING = ("PENDING", "PREPARED", "RESCHEDULING")


@dataclass(frozen=True)
class EngineStatus:
    """The status of one engine.

    status: as of `EngineStats`; "silent" if its coordinator does not answer. usage of KV pages: 0 to 1.
    """

    engine_id: str
    status: str
    detail: str = ""
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_ranks: int = 0
    num_restarts: int = 0


@dataclass(frozen=True)
class ApplicationStatus:
    """The status of one Serve application.

    route_prefix: None if it has no route.
    """

    name: str
    status: str
    message: str
    route_prefix: str | None
    deployments: Sequence[DeploymentStatus]
    engines: Sequence[EngineStatus]

    @property
    def is_well(self) -> bool:
        """Whether it runs, and each engine that should be there is ready."""
        expected = [deployment for deployment in self.deployments if deployment.name == ENGINE]
        ready = all(engine.status == "ready" for engine in self.engines)
        return self.status == "RUNNING" and ready and (bool(self.engines) or not expected)


@dataclass(frozen=True)
class WaitingGroup:
    """A placement group for which there is no room yet.

    application, deployment: whose replica it is; "" if it is not Serve's.
    lacks: why it cannot be placed, "" if there is room by now."""

    application: str
    deployment: str
    strategy: str
    bundles: Sequence[str]
    lacks: str


@dataclass(frozen=True)
class NodeStatus:
    """The status of one Ray node.

    free, total: resources in words.
    """

    address: str
    is_alive: bool
    free: str = ""
    total: str = ""


@dataclass(frozen=True)
class Report:
    """What `aerie status` prints.

    address: Ray's address, HOST:PORT.
    """

    address: str
    nodes: Sequence[NodeStatus]
    applications: Sequence[ApplicationStatus]
    waiting: Sequence[WaitingGroup]

    @property
    def is_well(self) -> bool:
        """Whether an application is there, all of them are well, and nothing waits for room."""
        return (
            bool(self.applications)
            and all(application.is_well for application in self.applications)
            and not self.waiting
        )


def waiting_groups(table: Mapping[str, Mapping[str, object]], rooms: Sequence[NodeRoom]) -> list[WaitingGroup]:
    """Return the placement groups of `ray.util.placement_group_table` that wait for room."""
    groups = []
    for group in table.values():
        if group["state"] not in _WAITING:
            continue
        bundles = list(group["bundles"].values())  # type: ignore[attr-defined]
        strategy = str(group["strategy"])
        # Serve (2.60) names the group of a replica SERVE_REPLICA::APPLICATION#DEPLOYMENT#ID.
        kind, _, replica = str(group["name"]).partition("::")
        application, _, rest = replica.partition("#") if kind == "SERVE_REPLICA" else ("", "", "")
        lacks = missing(bundles, strategy, rooms)
        words = [written(bundle) for bundle in bundles]
        groups.append(WaitingGroup(application, rest.partition("#")[0], strategy, words, lacks))
    return groups
