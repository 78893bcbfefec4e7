"""`Engine`: the Serve deployment whose replica is one tensor-parallel group, with its coordinator.

A request is one unary call of `generate` that lasts as long as the request, so that Serve's routing, queueing,
cancellation and draining see it; its tokens go from the coordinator straight to the ingress. Starting, watching and
restarting is `cluster.replica.supervisor`'s.
"""

import asyncio
import os
import sys
import time
import traceback
import uuid

import msgspec
import ray
from ray import serve
from ray.serve.context import _get_global_client

from cluster.config import AerieConfig
from cluster.logs import use_json_logs
from cluster.replica.coordinator_link import CoordinatorLink
from cluster.replica.plan_report import ready_line
from cluster.replica.supervisor import CoordinatorLostError, GaveUpError, Supervisor
from cluster.replica.worker_actor import Worker
from cluster.replica.worker_group import WorkerGroupError, WorkerGroupPlan
from cluster.transport.discovery import coordinator_prefix
from cluster.transport.folders import private_folder
from cluster.transport.keys import make_transport
from cluster.transport.messages import EngineAnswer, GenerateRequest, Probe, Refusal


class Engine:
    """One replica. config.model.device is "cpu" or "cuda". one_node: all of the application runs on this node.

    worker: the class of its ranks' actors.
    """

    worker: type[Worker] = Worker

    async def __init__(self, config: AerieConfig, one_node: bool) -> None:  # type: ignore[misc]
        group = ray.util.get_current_placement_group()
        assert group is not None, "the deployment has placement_group_bundles"
        engine_id = uuid.uuid4().hex[:8]
        if config.log_format == "json":
            use_json_logs(f"engine {engine_id}")
        application = serve.get_replica_context().app_name
        transport = make_transport(one_node, application)
        folder = transport.folder or str(private_folder())
        self._limit_s = 2 * config.engine.start_timeout_s
        self._supervisor = Supervisor(
            WorkerGroupPlan(config, self.worker, group, transport, folder, application),
            engine_id=engine_id,
            name_prefix=coordinator_prefix(application),
            report=_report,
        )
        started = time.monotonic()
        try:
            await self._supervisor.start()
        except (WorkerGroupError, CoordinatorLostError) as error:
            _report(f"the engine could not start: {error}")  # Serve tells this to its log file only, in some modes
            raise
        _report(ready_line(config, await asyncio.to_thread(_root_url), time.monotonic() - started))
        self._supervision = asyncio.create_task(self._supervise())

    async def generate(self, payload: bytes) -> bytes:
        """Run one request (`GenerateRequest`) to its end; returns an `EngineAnswer`. Cancelling the call aborts it.

        Raises EngineLostError if the coordinator dies meanwhile; the caller may resume elsewhere."""
        request = msgspec.msgpack.decode(payload, type=GenerateRequest)
        link = self._supervisor.link
        if link is None and request.resumed:
            link = await self._supervisor.next_link()  # a resumed stream waits for the restart; a new one is refused
        return await self._run(link, request)

    async def probe(self, payload: bytes) -> bytes:
        """The same for a `Probe`."""
        return await self._run(self._supervisor.link, msgspec.msgpack.decode(payload, type=Probe))

    async def _run(self, link: CoordinatorLink | None, request: GenerateRequest | Probe) -> bytes:
        if link is None:
            refusal = Refusal(kind="not_ready", message="the engine is being restarted", retry_after_s=5.0)
            return msgspec.msgpack.encode(EngineAnswer(refusal=refusal))
        answer = await link.run(request)
        if isinstance(answer, Refusal):
            return msgspec.msgpack.encode(EngineAnswer(refusal=answer))
        return msgspec.msgpack.encode(EngineAnswer(summary=answer))

    async def check_health(self) -> None:
        """Serve replaces the replica if this raises: not while it recovers, unless that takes two starts."""
        since = self._supervisor.down_since
        if since is not None and time.monotonic() - since > self._limit_s:
            raise RuntimeError("the workers could not be restarted")

    async def __del__(self) -> None:
        # Serve awaits this when it stops the replica, after its calls have ended.
        if hasattr(self, "_supervision"):
            self._supervision.cancel()
            self._supervisor.stop()

    async def _supervise(self) -> None:
        try:
            await self._supervisor.supervise()
        except Exception as error:
            _report(str(error) if isinstance(error, GaveUpError) else traceback.format_exc())
            # Serve replaces a replica that exits at once; failed health checks would take three periods, and under
            # HAProxy half a minute (measured on Ray 2.60: 36 s against 4 s).
            os._exit(1)


def _root_url() -> str:
    """Where Serve's HTTP listens. Serve has no public way to ask that inside a replica (Ray 2.60)."""
    url: str = _get_global_client().root_url
    return url


def _report(line: str) -> None:
    """Print to the console of `serve run`: Serve may have redirected sys.stdout to its log file."""
    assert sys.__stdout__ is not None
    sys.__stdout__.write(line + "\n")
    sys.__stdout__.flush()
