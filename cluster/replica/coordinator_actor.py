"""`EagleCoordinator`: the Ray actor of `aerie.cluster.coordinator`, one per engine. Created by
`aerie.cluster.replica.supervisor`. Actor calls start and watch the loop, attach worker groups and return statistics.
Plans, results and tokens use ZeroMQ."""

import asyncio
import time
from collections.abc import Callable

import msgspec

from aerie.cluster.coordinator.coordinator import Coordinator
from aerie.cluster.coordinator.loop import CoordinatorSettings
from aerie.cluster.coordinator.stats import continue_counters
from aerie.cluster.learning.gate import Candidate
from aerie.cluster.linux import raise_open_files
from aerie.cluster.logs import use_logs
from aerie.cluster.plan import ReplicaPlan
from aerie.cluster.start_log import StartLog
from aerie.cluster.transport.admin import AdminCall, AdminOutcome
from aerie.cluster.transport.messages import EngineStats, FlushOutcome
from aerie.cluster.transport.sockets import Transport
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.scheduler import Scheduler


class EagleCoordinator:
    """The scheduler's loop in an actor. Starts without the loop, so that it can report "starting" while workers
    load."""

    async def __init__(self, plan: ReplicaPlan, engine_id: str, transport: Transport) -> None:  # type: ignore[misc]
        raise_open_files()
        StartLog("coordinator").done("actor began")
        use_logs(plan.rank.log_format, f"coordinator {engine_id}")
        self._plan = plan
        self._engine_id = engine_id
        self._transport = transport
        self._coordinator: Coordinator | None = None
        self._loop = asyncio.get_running_loop()
        self._worker_group_lost: asyncio.Queue[str] = asyncio.Queue()
        self._death: asyncio.Future[str] = self._loop.create_future()

    async def open(self, layout: EngineLayout, former: bytes = b"") -> None:
        """Start the loop, for engines of this layout.

        former: `stats` of the previous coordinator, whose counters continue.
        """
        engine, speculative = self._plan.engine, self._plan.rank.speculative
        draft = speculative.path if self._plan.learning is not None and speculative is not None else ""
        scheduler = Scheduler.of(layout, time.monotonic)
        if former:
            continue_counters(scheduler, msgspec.msgpack.decode(former, type=EngineStats))
        coordinator = Coordinator(
            scheduler,
            CoordinatorSettings(
                engine_id=self._engine_id,
                transport=self._transport,
                on_worker_loss=engine.on_worker_loss,
                max_resumes=engine.max_resumes,
                step_timeout_s=engine.step_timeout_s,
                queue_timeout_s=engine.queue_timeout_s,
                identity=self._plan.identity,
                learning_draft=draft,
            ),
            on_worker_group_lost=lambda reason: self._report(self._worker_group_lost.put_nowait, reason),
            on_death=lambda reason: self._report(self._die, reason),
        )
        coordinator.start()
        self._coordinator = coordinator

    async def endpoint(self) -> str:
        """Return the inbox for `connect_engine`; "" before `open`."""
        return "" if self._coordinator is None else self._coordinator.endpoint

    async def attach(self, endpoints: list[str], epoch: int, costs: CostTable | None, places: list[str]) -> None:
        """Use a new worker group. The loss of a previous one is no longer reported."""
        assert self._coordinator is not None
        self._worker_group_lost = asyncio.Queue()
        self._coordinator.attach(endpoints, epoch, costs, places)

    async def detach(self, reason: str) -> None:
        assert self._coordinator is not None
        self._coordinator.detach(reason)

    async def worker_group_lost(self) -> str:
        """Wait until the attached worker group is lost; return why."""
        return await self._worker_group_lost.get()

    async def death(self) -> str:
        """Wait until the loop fails; return why. Raises if the actor's process ends."""
        return await self._death

    async def stats(self) -> bytes:
        """Return `EngineStats` as msgpack."""
        if self._coordinator is None:
            stats = EngineStats(engine_id=self._engine_id, status="starting")
        else:
            stats = await asyncio.to_thread(self._coordinator.stats)
        return msgspec.msgpack.encode(stats)

    async def flush_cache(self) -> bytes:
        """Empty the prefix cache if there are no requests. Return `FlushOutcome` as msgpack."""
        if self._coordinator is None:
            outcome = FlushOutcome(self._engine_id)  # nothing has run yet
        else:
            outcome = await asyncio.to_thread(self._coordinator.flush_cache)
        return msgspec.msgpack.encode(outcome)

    async def administer(self, call: bytes) -> bytes:
        """Do an `AdminCall`, given as msgpack. Return `AdminOutcome` as msgpack."""
        if self._coordinator is None:
            outcome = AdminOutcome(self._engine_id, error="the engine is starting")
        else:
            asked = msgspec.msgpack.decode(call, type=AdminCall)
            outcome = await asyncio.to_thread(self._coordinator.administer, asked)
        return msgspec.msgpack.encode(outcome)

    async def learner_news(self) -> bytes:
        """Return `News` as msgpack. Raises if the coordinator has ended."""
        assert self._coordinator is not None
        return msgspec.msgpack.encode(await asyncio.to_thread(self._coordinator.learner_news))

    async def offer_draft(self, candidate: bytes) -> str:
        """Count a `Candidate`, given as msgpack, and publish it if it is better. Return an error or ""."""
        assert self._coordinator is not None
        offered = msgspec.msgpack.decode(candidate, type=Candidate)
        return await asyncio.to_thread(self._coordinator.offer_draft, offered)

    async def drain(self) -> None:
        """Refuse new requests and wait for the others. After engine.drain_timeout_s they end with an error."""
        limit_s = self._plan.engine.drain_timeout_s
        if self._coordinator is not None and not await asyncio.to_thread(self._coordinator.drain, limit_s):
            reason = f"the server is shutting down, and engine.drain_timeout_s={limit_s:g} is over"
            await asyncio.to_thread(self._coordinator.fail_all, reason)

    async def leave(self) -> None:
        """Refuse new requests, because another engine replaces this one, and wait for the others."""
        if self._coordinator is not None:
            await asyncio.to_thread(self._coordinator.drain, self._plan.engine.drain_timeout_s, True)

    async def loop_age_s(self) -> float:
        """Return the seconds since the loop's last iteration, even if it hangs."""
        return 0.0 if self._coordinator is None else self._coordinator.loop_age_s()

    def _report(self, listener: Callable[[str], None], reason: str) -> None:
        self._loop.call_soon_threadsafe(listener, reason)

    def _die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)
