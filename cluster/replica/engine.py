"""`Engine`: the Serve deployment. A replica is one tensor-parallel group with its coordinator;
`aerie.cluster.replica.supervisor` manages its processes. Serve places, starts, watches and replaces it. Requests and
tokens do not pass through it: ingresses and its coordinator exchange them.

Serve's autoscaling calls `desired_replicas` with each replica's load. A refused start is remembered in Ray's key-value
store, because Serve (2.60) restarts a replica after any exception of its constructor: later attempts raise the same
error at once, without loading, and `aerie serve` ends.
"""

import asyncio
import dataclasses
import math
import os
import time
import traceback
import uuid
from collections.abc import Collection
from typing import Any, Protocol

import msgspec
import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from aerie.cluster.plan import ReplicaPlan, start_identity
from aerie.cluster.replica.supervisor import CoordinatorLostError, GaveUpError, Supervisor
from aerie.cluster.replica.worker_actor import WorkerActor
from aerie.cluster.replica.worker_group import StartRefusedError, WorkerGroupError, WorkerGroupPlan
from aerie.cluster.start_log import READY, StartLog, print_line, use_logs
from aerie.cluster.transport.discovery import coordinator_prefix, make_transport
from aerie.cluster.transport.sockets import private_folder

# Serve restarts replicas after 1, 2 and 4 s. A longer memory would outlast a fault of one node.
FRESH_S = 30.0


class Refusal(msgspec.Struct):
    """A refused start, in Ray's key-value store.

    at: Unix seconds.
    identity: see `aerie.cluster.plan.start_identity`.
    reason: the error's text.
    """

    at: float
    identity: str
    reason: str


def remember(application: str, plan: ReplicaPlan, reason: str) -> None:
    """Record for all processes of the cluster why an engine of `application` cannot start."""
    _internal_kv_put(_key(application), msgspec.msgpack.encode(Refusal(time.time(), start_identity(plan), reason)))


def start_refusal(application: str, plan: ReplicaPlan | None = None, since: float = 0.0) -> str:
    """Return why an engine of `application` cannot start; "" if unknown. plan: only a refusal of the same plan and
    files counts. since: Unix time before which refusals do not count."""
    stored = _internal_kv_get(_key(application))
    if not stored:
        return ""
    refusal = msgspec.msgpack.decode(stored, type=Refusal)
    is_same = plan is None or refusal.identity == start_identity(plan)
    is_fresh = refusal.at >= since and abs(time.time() - refusal.at) < FRESH_S
    return refusal.reason if is_same and is_fresh else ""


def _key(application: str) -> bytes:
    return f"aerie-refused:{application}".encode()


FULL_WAIT_S = 2.0  # an engine where a new request would wait this long is full
AIM = 0.7  # target load of an engine, as a share of full
SLACK = 0.85  # scale down only if the remaining engines stay below this share of the target


class ScalingContext(Protocol):
    """The used fields of `ray.serve.config.AutoscalingContext`. aggregated_metrics: by name, of each replica."""

    target_num_replicas: int
    aggregated_metrics: dict[str, dict[Any, float]] | None


def engine_load(num_requests: int, num_slots: int, backlog_s: float, wait_s: float) -> float:
    """Return an engine's load; 1 is its maximum.

    num_requests: unfinished requests.
    backlog_s: time to compute pending prompts.
    wait_s: expected wait of a new request for a slot, beyond `backlog_s`.
    """
    return max(num_requests / num_slots, (backlog_s + wait_s) / FULL_WAIT_S)


def replicas_for(loads: Collection[float], current: int) -> int:
    """Return the number of engines for these loads. It is lower than `current` only if the remaining engines would stay
    well below their target; otherwise a load at the limit would start and stop an engine again and again."""
    if not loads:
        return current
    total = sum(loads)
    wanted = max(1, math.ceil(total / AIM))
    return wanted if wanted >= current else min(current, max(1, math.ceil(total / (AIM * SLACK))))


def desired_replicas(context: ScalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of engines that Serve should run, and a state for Serve to keep, which is empty. Called by
    Serve."""
    loads = (context.aggregated_metrics or {}).get("load", {})
    return replicas_for(loads.values(), context.target_num_replicas), {}


class Engine:
    """One replica. worker: class of its ranks' actors."""

    worker: type[WorkerActor] = WorkerActor

    async def __init__(self, plan: ReplicaPlan) -> None:  # type: ignore[misc]
        StartLog("engine").done("replica began")
        group = ray.util.get_current_placement_group()
        assert group is not None, "the deployment has placement_group_bundles"
        engine_id = uuid.uuid4().hex[:8]
        use_logs(plan.rank.log_format, f"engine {engine_id}")
        application = serve.get_replica_context().app_name
        transport = make_transport(plan.one_node, application)
        folder = transport.folder or str(private_folder())
        waits = plan.learning is not None and plan.learning.priority == "engine_idle"
        supervised = dataclasses.replace(plan, busy_file=f"{folder}/busy") if waits else plan
        self._limit_s = 2 * plan.engine.start_timeout_s
        self._supervisor = Supervisor(
            WorkerGroupPlan(supervised, self.worker, group, transport, folder, application),
            engine_id=engine_id,
            name_prefix=coordinator_prefix(application),
            report=print_line,
        )
        log = StartLog("engine", time.time())
        if reason := start_refusal(application, plan):
            raise StartRefusedError(reason)
        try:
            await self._supervisor.start()
        except StartRefusedError as error:
            print(f"the engine could not start: {error}")  # the last line of `aerie serve`
            remember(application, plan, str(error))
            raise
        except (WorkerGroupError, CoordinatorLostError) as error:
            print_line(f"the engine could not start: {error}")  # in some modes Serve writes stdout only to its log file
            raise
        log.done(READY)
        self._supervision = asyncio.create_task(self._supervise())

    async def check_health(self) -> None:
        """Raise if Serve should replace the replica. An engine may recover for up to two start timeouts without
        that."""
        since = self._supervisor.down_since
        if since is not None and time.monotonic() - since > self._limit_s:
            raise RuntimeError("the workers could not be restarted")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for Serve's autoscaling; see `aerie.cluster.replica.engine`."""
        stats = self._supervisor.last_stats
        if stats is None:
            return {"load": 0.0}
        num_requests = stats.num_running + stats.num_waiting
        return {"load": engine_load(num_requests, stats.num_slots, stats.backlog_s, stats.slot_wait_s)}

    async def __del__(self) -> None:
        # Serve awaits this when it stops the replica, and kills it after graceful_shutdown_timeout_s.
        if hasattr(self, "_supervision"):
            await self._supervisor.drain()
            self._supervision.cancel()
            self._supervisor.stop()

    async def _supervise(self) -> None:
        """Supervise until the engine gives up; then end this process, so that Serve replaces the replica."""
        try:
            await self._supervisor.supervise()
        except Exception as error:
            print_line(str(error) if isinstance(error, GaveUpError) else traceback.format_exc())
            # Serve replaces a replica that exits at once. Failed health checks would take three periods; under HAProxy,
            # 36 s instead of 4 s (measured with Ray 2.60).
            os._exit(1)
