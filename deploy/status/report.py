"""What a cluster says of itself: nodes, applications with their deployments and engines, and placement groups that wait
for room. Read by `aerie.deploy.status.collect`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aerie.deploy.serve.applications import DeploymentStatus
from aerie.deploy.status.missing import NodeRoom, missing, written

ENGINE = "Engine"  # name of the deployment (`aerie.deploy.app`)
_WAITING = ("PENDING", "PREPARED", "RESCHEDULING")


@dataclass(frozen=True)
class EngineStatus:
    """status: as of `EngineStats`; "silent" if its coordinator does not answer. usage of KV pages: 0 to 1."""

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
    """route_prefix: None if it has no route."""

    name: str
    status: str
    message: str
    route_prefix: str | None
    deployments: Sequence[DeploymentStatus]
    engines: Sequence[EngineStatus]

    @property
    def is_well(self) -> bool:
        """Whether it runs, and each engine that should be there is ready."""
        expected = [each for each in self.deployments if each.name == ENGINE]
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
    """free, total: resources in words."""

    address: str
    is_alive: bool
    free: str = ""
    total: str = ""


@dataclass(frozen=True)
class Report:
    """address: of Ray, HOST:PORT."""

    address: str
    nodes: Sequence[NodeStatus]
    applications: Sequence[ApplicationStatus]
    waiting: Sequence[WaitingGroup]

    @property
    def is_well(self) -> bool:
        """Whether an application is there, all of them are well, and nothing waits for room."""
        return bool(self.applications) and all(each.is_well for each in self.applications) and not self.waiting


def waiting_groups(table: Mapping[str, Mapping[str, object]], rooms: Sequence[NodeRoom]) -> list[WaitingGroup]:
    """Return the placement groups of `ray.util.placement_group_table` that wait for room."""
    found = []
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
        found.append(WaitingGroup(application, rest.partition("#")[0], strategy, words, lacks))
    return found
