"""Asks the Ray that this process has joined: the GCS, Serve's controller and the coordinators, never the dashboard.
Imported once Ray's variables are set, because importing Ray reads them."""

from collections.abc import Mapping

import msgspec
import ray
from ray._private.state import available_resources_per_node

from aerie.cluster.transport.discovery import find_coordinators
from aerie.cluster.transport.messages import EngineStats
from aerie.deploy.serve.applications import read_applications
from aerie.deploy.status.report import (
    ApplicationStatus,
    EngineStatus,
    NodeRoom,
    NodeStatus,
    Report,
    waiting_groups,
    written,
)

_STATS_LIMIT_S = 5.0  # maximum time to wait for statistics


def read_report(address: str, name: str | None) -> Report:
    """Ask the Ray that this process has joined. name: of the only application to report; None: all."""
    free = available_resources_per_node()
    nodes, rooms = [], []
    for node in ray.nodes():
        here = NodeStatus(node["NodeManagerAddress"], node["Alive"])
        if node["Alive"]:
            room = NodeRoom(_countable(node["Resources"]), _countable(free.get(node["NodeID"], {})))
            rooms.append(room)
            everything = {kind: room.free.get(kind, 0.0) for kind in room.total}
            here = NodeStatus(here.address, True, written(everything), written(room.total))
        nodes.append(here)
    applications = [
        ApplicationStatus(
            app_name, state.status, state.message, state.route_prefix, state.deployments, _engines(app_name)
        )
        for app_name, state in read_applications().items()
        if name in (None, app_name)
    ]
    waiting = [
        group for group in waiting_groups(ray.util.placement_group_table(), rooms) if name in (None, group.application)
    ]
    return Report(address, nodes, applications, waiting)


def _engines(application: str) -> list[EngineStatus]:
    """Return the state of the application's engines, by asking their coordinators."""
    asked = {
        name: coordinator.stats.remote() for name, coordinator in sorted(find_coordinators(application, {}).items())
    }
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_STATS_LIMIT_S)
    return [_engine(engine_id, reference) for engine_id, reference in asked.items()]


def _engine(engine_id: str, reference: object) -> EngineStatus:
    """Return an engine's status; "silent" if its coordinator has not answered."""
    try:
        stats = msgspec.msgpack.decode(ray.get(reference, timeout=0), type=EngineStats)
    except ray.exceptions.RayError as error:  # it has died, or has not answered
        return EngineStatus(engine_id, "silent", type(error).__name__)
    return EngineStatus(
        engine_id,
        stats.status,
        detail=stats.detail,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        kv_usage=stats.kv_usage,
        num_ranks=len(stats.heartbeat_age_s),
        num_restarts=stats.num_worker_restarts,
    )


def _countable(resources: Mapping[str, float]) -> dict[str, float]:
    """Leave out memory, which Ray counts in bytes, and the names of nodes."""
    return {name: count for name, count in resources.items() if "memory" not in name and ":" not in name}
