"""Keeps one engine alive: restarts its coordinator and worker group when one fails. Used by the `Engine` deployment;
needs Ray and a placement group, not Serve. `EagleCoordinator` is the Ray actor of `aerie.cluster.coordinator`, one per
engine: calls start and watch the loop, attach worker groups and return statistics; plans, results and tokens use
ZeroMQ."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from aerie.cluster.coordinator.coordinator import Coordinator
from aerie.cluster.coordinator.loop import CoordinatorSettings
from aerie.cluster.coordinator.state_publisher import continue_counters
from aerie.cluster.learning.gate import Candidate
from aerie.cluster.linux import raise_open_files
from aerie.cluster.placement import ENGINE_CPUS
from aerie.cluster.plan import ReplicaPlan
from aerie.cluster.replica.learner_actor import DraftLearner
from aerie.cluster.replica.plan_report import cost_line, rank_lines
from aerie.cluster.replica.worker_group import (
    Report,
    Spares,
    StartRefusedError,
    WorkerGroup,
    WorkerGroupError,
    WorkerGroupPlan,
    awaited,
    first_line,
)
from aerie.cluster.start_log import StartLog, use_logs
from aerie.cluster.transport.admin import AdminCall, AdminOutcome
from aerie.cluster.transport.discovery import NAMESPACE
from aerie.cluster.transport.messages import EngineStats, FlushOutcome
from aerie.cluster.transport.sockets import Transport
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.scheduler import Scheduler


class EagleCoordinator:
    """The Ray actor that runs the coordinator: the scheduler's loop of one engine. It has nothing to do with EAGLE
    drafts. Starts without the loop, so that it can report "starting" while workers load."""

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
                busy_file=self._plan.busy_file,
            ),
            on_worker_group_lost=lambda reason: self._report(self._worker_group_lost.put_nowait, reason),
            on_death=lambda reason: self._report(self._die, reason),
        )
        coordinator.start()
        self._coordinator = coordinator

    async def endpoint(self) -> str:
        """Return the ZeroMQ address of the loop's inbox, for `connect_engine`; "" before `open`."""
        return "" if self._coordinator is None else self._coordinator.endpoint

    async def attach(self, endpoints: list[str], epoch: int, costs: CostTable | None, locations: list[str]) -> None:
        """Use a new worker group. The loss of a previous one is no longer reported."""
        assert self._coordinator is not None
        self._worker_group_lost = asyncio.Queue()
        self._coordinator.attach(endpoints, epoch, costs, locations)

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


T = TypeVar("T")

WATCH_PERIOD_S = 2.0
LOOP_LIMIT_S = 30.0  # an iteration of a coordinator's loop takes at most half a second
BACKOFF_LIMIT_S = 30.0  # maximum delay between two restarts
CALL_TIMEOUT_S = 10.0  # for an actor call that should take milliseconds


class GaveUpError(RuntimeError):
    """The workers could not be restarted; the engine's process should end."""


class CoordinatorLostError(RuntimeError):
    """The coordinator died or does not answer; the engine's requests are lost with it."""


class Supervisor:
    """One engine's processes. Ingresses find its coordinator by name (`aerie.cluster.transport.discovery`).

    down_since: monotonic seconds, None while serving.
    """

    def __init__(self, plan: WorkerGroupPlan, engine_id: str, name_prefix: str, report: Report) -> None:
        self.down_since: float | None = None
        self._plan = plan
        self._engine_id = engine_id
        self._name_prefix = name_prefix
        self._report = report
        self._epoch = 0
        self._num_coordinators = 0
        self._coordinator: Any = None
        self._learner: Any = None
        self._is_open = False  # the coordinator accepts requests
        self._coordinator_death: asyncio.Future[str] | None = None
        self._worker_group: WorkerGroup | None = None
        self._former: WorkerGroup | None = None
        self._spares: Spares | None = None
        self._last_stats = b""  # at most WATCH_PERIOD_S old; its counters outlive the coordinator

    @property
    def last_stats(self) -> EngineStats | None:
        """The coordinator's last statistics, up to WATCH_PERIOD_S old; None before the first."""
        return msgspec.msgpack.decode(self._last_stats, type=EngineStats) if self._last_stats else None

    async def start(self) -> None:
        """Start for the first time. There is no second attempt, because most failures are errors of the
        configuration."""
        try:
            await self._bring_up()
        except BaseException:
            self.stop()
            raise

    async def supervise(self) -> None:
        """Wait for a failure, clean up and restart, forever. Raises GaveUpError."""
        while True:
            try:
                reason, lost_coordinator = await self._worker_group_failure(), False
            except CoordinatorLostError as error:
                reason, lost_coordinator = str(error), True
            self.down_since = time.monotonic()
            self._report(f"engine {self._engine_id}, epoch {self._epoch}: {reason}; restarting")
            await self._clear(reason, lost_coordinator)
            await self._restart()
            self._report(f"engine {self._engine_id}: serving again after {time.monotonic() - self.down_since:.1f} s")
            self.down_since = None

    async def drain(self) -> None:
        """Finish running requests and accept no new ones. What is unfinished after `engine.drain_timeout_s` is resumed
        on another engine."""
        with contextlib.suppress(CoordinatorLostError, ray.exceptions.RayTaskError):
            if self._is_open:
                await self._ask("leave", limit_s=self._plan.replica.engine.drain_timeout_s + CALL_TIMEOUT_S)

    def stop(self) -> None:
        """Kill everything."""
        if self._worker_group is not None:
            self._worker_group.kill(hung=False)
            self._worker_group = None
        if self._spares is not None:
            self._spares.kill()
            self._spares = None
        self._drop_coordinator()
        shutil.rmtree(self._plan.folder, ignore_errors=True)

    async def _restart(self) -> None:
        config = self._plan.replica.engine
        backoff_s = config.restart_backoff_s
        for attempt in range(1, config.max_restarts + 1):
            try:
                await self._bring_up()
                return
            except StartRefusedError as error:
                self.stop()
                raise GaveUpError(
                    f"engine {self._engine_id}: gave up, because another start would fail in the same way: {error}"
                ) from None
            except (WorkerGroupError, CoordinatorLostError) as error:
                self._report(f"engine {self._engine_id}: attempt {attempt} of {config.max_restarts} failed: {error}")
                if isinstance(error, CoordinatorLostError):
                    self._drop_coordinator()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_LIMIT_S)
        self.stop()
        raise GaveUpError(f"engine {self._engine_id}: gave up after {config.max_restarts} failed starts")

    async def _bring_up(self) -> None:
        """Start a coordinator if there is none, then a worker group, and attach the group to the coordinator. If that
        fails, kill the group."""
        if self._coordinator is None:
            self._start_coordinator()
        self._epoch += 1
        name = f"{self._engine_id}.{self._num_coordinators}"
        spares, self._spares = self._spares, None
        worker_group = WorkerGroup(self._plan, name, self._epoch, self._report, self._former, spares)
        await worker_group.start()
        try:
            if not self._is_open:
                await self._ask("open", worker_group.layout, self._last_stats, limit_s=60.0)
                self._is_open = True
                self._start_learner()
            locations = [member.process for member in worker_group.locations]
            attached = (worker_group.endpoints, worker_group.epoch, worker_group.costs, locations)
            await self._ask("attach", *attached, limit_s=CALL_TIMEOUT_S)
        except BaseException:
            worker_group.kill()
            raise
        self._worker_group = self._former = worker_group
        if self._epoch == 1:
            for line in rank_lines(worker_group.locations, worker_group.layout):
                self._report(line)
            if worker_group.costs is not None:
                self._report(cost_line(worker_group.layout, worker_group.costs))
        if self._plan.replica.has_spare_workers:
            self._spares = worker_group.start_spares()

    def _start_coordinator(self) -> None:
        self._num_coordinators += 1
        name = f"{self._engine_id}.{self._num_coordinators}"
        placed = PlacementGroupSchedulingStrategy(self._plan.group, placement_group_bundle_index=0)
        self._coordinator = (
            ray.remote(EagleCoordinator)
            .options(
                name=self._name_prefix + name,
                namespace=NAMESPACE,
                num_cpus=ENGINE_CPUS,
                max_restarts=0,
                max_concurrency=100,  # calls that wait for a failure, and the ingresses' calls for statistics
                scheduling_strategy=placed,
            )
            .remote(self._plan.replica, name, self._plan.transport)
        )
        self._coordinator_death = asyncio.ensure_future(awaited(self._coordinator.death.remote()))

    def _start_learner(self) -> None:
        """Start the training of the draft, if it learns, on the coordinator's node. Ray restarts it if it fails."""
        learning = self._plan.replica.learning
        if learning is None:
            return
        placed = PlacementGroupSchedulingStrategy(self._plan.group, placement_group_bundle_index=0)
        options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": placed}
        folder = f"{learning.folder or self._plan.folder}/drafts-{self._engine_id}-{self._num_coordinators}"
        self._learner = ray.remote(DraftLearner).options(**options).remote(self._plan.replica, folder)
        self._learner.run.remote(self._name_prefix, f"{self._engine_id}.{self._num_coordinators}")

    async def _clear(self, reason: str, lost_coordinator: bool) -> None:
        """Reach a known state: no worker group is attached, or no coordinator runs."""
        assert self._worker_group is not None
        self._worker_group.kill()
        self._worker_group = None
        if not lost_coordinator:
            with contextlib.suppress(CoordinatorLostError):
                await self._ask("detach", reason, limit_s=CALL_TIMEOUT_S)
                return
        self._drop_coordinator()

    def _drop_coordinator(self) -> None:
        """Kill the coordinator, and the training beside it."""
        self._is_open = False
        if self._learner is not None:
            ray.kill(self._learner, no_restart=True)
            self._learner = None
        if self._coordinator is not None:
            ray.kill(self._coordinator, no_restart=True)
            self._coordinator = None
        if self._coordinator_death is not None:
            self._coordinator_death.cancel()
            self._coordinator_death = None

    async def _worker_group_failure(self) -> str:
        """Wait until a rank is lost or hangs; return why. Raises CoordinatorLostError.

        A death is noticed by the first of three events: the actor call ends, the socket closes, the coordinator reports
        it. Only the coordinator notices a hang.
        """
        assert self._worker_group is not None and self._coordinator_death is not None
        ended = asyncio.ensure_future(self._worker_group.failure())
        reported = asyncio.ensure_future(awaited(self._coordinator.worker_group_lost.remote()))
        try:
            while True:
                watched = (ended, reported, self._coordinator_death)
                await asyncio.wait(watched, timeout=WATCH_PERIOD_S, return_when=asyncio.FIRST_COMPLETED)
                if self._coordinator_death.done():
                    raise CoordinatorLostError(_outcome(self._coordinator_death))
                if reported.done() or ended.done():
                    return _outcome(reported if reported.done() else ended)
                age_s = await self._ask("loop_age_s", limit_s=CALL_TIMEOUT_S)
                if age_s > LOOP_LIMIT_S:
                    raise CoordinatorLostError(f"the coordinator's loop hangs for {age_s:.0f} s")
                with contextlib.suppress(CoordinatorLostError, ray.exceptions.RayTaskError):  # it may be busy
                    self._last_stats = await self._ask("stats", limit_s=WATCH_PERIOD_S)
        finally:
            ended.cancel()
            reported.cancel()

    async def _ask(self, method: str, *arguments: object, limit_s: float) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                return await getattr(self._coordinator, method).remote(*arguments)
        except TimeoutError:
            raise CoordinatorLostError(f"the coordinator did not answer `{method}` in {limit_s:g} s") from None
        except ray.exceptions.RayActorError as error:
            raise CoordinatorLostError(f"the coordinator died: {first_line(error)}") from None


def _outcome(failure: "asyncio.Future[str]") -> str:
    error = failure.exception()
    return failure.result() if error is None else first_line(error)
