"""`Engine`: the Serve deployment. A replica is one tensor-parallel group with its coordinator.

Serve places, starts, watches and replaces it. Requests and tokens do not pass through it: ingresses and its coordinator
exchange them. `aerie.cluster.replica.supervisor` manages its processes.
"""

import asyncio
import os
import time
import traceback
import uuid

import ray
from ray import serve

from aerie.cluster.logs import print_line, use_logs
from aerie.cluster.plan import ReplicaPlan
from aerie.cluster.replica import refusals
from aerie.cluster.replica.scaling import engine_load
from aerie.cluster.replica.supervisor import CoordinatorLostError, GaveUpError, Supervisor
from aerie.cluster.replica.worker_actor import Worker
from aerie.cluster.replica.worker_group import StartRefusedError, WorkerGroupError, WorkerGroupPlan
from aerie.cluster.start_log import READY, StartLog
from aerie.cluster.transport.discovery import coordinator_prefix, make_transport
from aerie.cluster.transport.folders import private_folder


class Engine:
    """One replica. worker: class of its ranks' actors."""

    worker: type[Worker] = Worker

    async def __init__(self, plan: ReplicaPlan) -> None:  # type: ignore[misc]
        StartLog("engine").done("replica began")
        group = ray.util.get_current_placement_group()
        assert group is not None, "the deployment has placement_group_bundles"
        engine_id = uuid.uuid4().hex[:8]
        use_logs(plan.rank.log_format, f"engine {engine_id}")
        application = serve.get_replica_context().app_name
        transport = make_transport(plan.one_node, application)
        folder = transport.folder or str(private_folder())
        self._limit_s = 2 * plan.engine.start_timeout_s
        self._supervisor = Supervisor(
            WorkerGroupPlan(plan, self.worker, group, transport, folder, application),
            engine_id=engine_id,
            name_prefix=coordinator_prefix(application),
            report=print_line,
        )
        log = StartLog("engine", time.time())
        if reason := refusals.remembered(application, plan):
            raise StartRefusedError(reason)
        try:
            await self._supervisor.start()
        except StartRefusedError as error:
            print(f"the engine could not start: {error}")  # the last line of `aerie serve`
            refusals.remember(application, plan, str(error))
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
        """Return the load for Serve's autoscaling; see `aerie.cluster.replica.scaling`."""
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
        try:
            await self._supervisor.supervise()
        except Exception as error:
            print_line(str(error) if isinstance(error, GaveUpError) else traceback.format_exc())
            # Serve replaces a replica that exits at once. Failed health checks would take three periods; under HAProxy,
            # 36 s instead of 4 s (measured with Ray 2.60).
            os._exit(1)
