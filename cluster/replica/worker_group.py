"""One epoch of an engine's workers, which are started, watched and killed together.

Used by `aerie.cluster.replica.supervisor`. A worker group is never repaired: when one rank dies the others wait in a
collective for minutes, so all are killed and a new worker group with a new rendezvous takes their place.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from aerie.cluster.placement import WORKER_CPUS, RankLocation, order_ranks
from aerie.cluster.plan import ReplicaPlan
from aerie.cluster.replica.worker_actor import WorkerActor
from aerie.cluster.start_log import StartLog
from aerie.cluster.transport.discovery import application_keys
from aerie.cluster.transport.sockets import Transport
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.memory_use import DeviceMemoryError
from aerie.workers.scheduling.cost_table import CostTable

LOOPBACK = "127.0.0.1"
PLACED_POLL_S = 0.1  # seconds between two looks at the placement

Report = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class WorkerGroupPlan:
    """Data shared by all worker groups of an engine.

    worker: the class of a rank's actor.
    group: the placement group; bundle 0 holds the engine and its coordinator, see `aerie.cluster.placement`.
    transport: transport of the engine's and the coordinator's processes.
    folder: folder of this node for the sockets of ranks beside the coordinator.
    application: name of the application, whose keys are used by ranks on other nodes.
    """

    replica: ReplicaPlan
    worker: type[WorkerActor]
    group: PlacementGroup
    transport: Transport
    folder: str
    application: str

    def start_worker(self, rank: int | None, bundle: int) -> Any:
        """Start the actor of a rank or of a spare. A spare takes no resources, because a rank still has those that it
        will use; it sees no GPU until it takes over the rank's."""
        plan, is_rank = self.replica.rank, rank is not None
        return (
            ray.remote(self.worker)
            .options(
                num_cpus=WORKER_CPUS if is_rank else 0,
                num_gpus=1 if is_rank and plan.uses_gpus else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle),
            )
            .remote(plan, rank)
        )


@dataclass(frozen=True)
class Spares:
    """Spare processes, which become the ranks of the next worker group, in the order of ranks.

    bundles: bundles of the placement group.
    devices: visible GPUs of each, see `aerie.cluster.environment.visible_devices`.
    """

    workers: list[Any]
    bundles: list[int]
    devices: list[str | None]

    def kill(self) -> None:
        for worker in self.workers:
            ray.kill(worker, no_restart=True)


class WorkerGroup:
    """The workers of one epoch. After `start`, its `endpoints` can be attached; `failure` returns when a rank is lost.

    costs: times of its steps, if measured.
    """

    def __init__(
        self,
        plan: WorkerGroupPlan,
        name: str,
        epoch: int,
        report: Report,
        former: "WorkerGroup | None" = None,
        spares: Spares | None = None,
    ) -> None:
        """former: the group that this one replaces; the scheduler continues with its layout and costs.
        spares: become this group's ranks; see `start_spares`."""
        self.epoch = epoch
        self.layout: EngineLayout
        self.costs: CostTable | None = former.costs if former is not None else None
        self.locations: list[RankLocation] = []
        self.endpoints: list[str] = []
        self._name = name
        self._done = "nothing"
        self._plan = plan
        self._log = StartLog("engine", time.time(), report)
        self._former = former.layout if former is not None else None
        self._spares = spares
        self._bundles: list[int] = []
        self._workers: list[Any] = []
        self._runs: list[asyncio.Future[str]] = []

    async def start(self) -> None:
        """Place, load and warm up all ranks. Raises WorkerGroupError after killing what was started."""
        try:
            async with asyncio.timeout(self._plan.replica.engine.start_timeout_s):
                await self._start()
        except TimeoutError:
            self.kill()
            limit = self._plan.replica.engine.start_timeout_s
            raise WorkerGroupError(
                f"not ready after engine.start_timeout_s={limit:g} (last done: {self._done})"
            ) from None
        except ray.exceptions.RayError as error:
            self.kill(hung=False)
            raise WorkerGroupError(f"after {self._done}: {first_line(error)}") from error
        except BaseException:
            self.kill(hung=False)
            raise

    async def failure(self) -> str:
        """Wait until a rank ends, and return the reason."""
        done, _ = await asyncio.wait(self._runs, return_when=asyncio.FIRST_COMPLETED)
        rank = next(r for r, run in enumerate(self._runs) if run in done)
        error = self._runs[rank].exception()
        reason = first_line(error) if error is not None else self._runs[rank].result()
        return f"rank {rank} ({self.locations[rank].process}): {reason}"

    def kill(self, hung: bool = True) -> None:
        """End every rank at once. hung: whether some ranks may not answer."""
        for worker in self._workers:
            ray.kill(worker, no_restart=True)
        # ray.kill needs an answer of the process; a stopped one, or one stuck in a driver, gives none.
        own_node = ray.get_runtime_context().get_node_id()
        for member in self.locations if hung else ():
            if member.node_id == own_node:
                _kill(member.pid)
            else:
                there = NodeAffinitySchedulingStrategy(member.node_id, soft=False)
                ray.remote(_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(member.pid)
        self._workers = []
        for run in self._runs:
            run.add_done_callback(_retrieve)

    async def _start(self) -> None:
        """Place, build and connect all ranks."""
        await self._phase("placed, imported", self._place)
        alone = all(member.node_id == self.locations[0].node_id for member in self.locations)
        addresses = [LOOPBACK if alone else member.address for member in self.locations]
        rendezvous = await self._workers[0].rendezvous.remote(addresses[0])
        per_rank = [(rendezvous, address, self._former) for address in addresses]
        self.layout, costs = (await self._phase("built", lambda: self._all("build", per_rank)))[0]
        self.costs = costs or self.costs
        here = alone and self.locations[0].node_id == ray.get_runtime_context().get_node_id()
        self.endpoints = await self._all(
            "listen", [(self._transport(member, here), self._name, self.epoch) for member in self.locations]
        )
        self._runs = [asyncio.ensure_future(awaited(worker.run.remote())) for worker in self._workers]

    def _transport(self, member: RankLocation, here: bool) -> Transport:
        if here:
            return Transport(folder=self._plan.folder)
        return Transport(node_ip=member.address, keys=application_keys(self._plan.application))

    def start_spares(self) -> Spares:
        """Start spare processes for the next group, each beside a rank of this one."""
        workers = [self._plan.start_worker(None, bundle) for bundle in self._bundles]
        return Spares(workers, self._bundles, [member.visible_devices for member in self.locations])

    async def _place(self) -> None:
        """Start a worker for each rank, or take the spare ones, and learn their locations."""
        if self._spares is not None:
            self._workers, self._bundles = self._spares.workers, self._spares.bundles
            await self._all("take_rank", list(enumerate(self._spares.devices)))
        else:
            nodes = await self._bundle_nodes()
            addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            self._bundles = order_ranks(nodes, self._plan.replica.rank.worker.tensor_parallel, addresses)
            self._workers = [self._plan.start_worker(rank, bundle) for rank, bundle in enumerate(self._bundles)]
        self.locations = await self._all("location")
        if len({member.is_prestarted for member in self.locations}) > 1:
            # ranks that were started ahead wait for each other, and one is missing
            self.kill(hung=False)
            self._workers = [self._plan.start_worker(rank, bundle) for rank, bundle in enumerate(self._bundles)]
            self.locations = await self._all("location")

    async def _bundle_nodes(self) -> dict[int, str]:
        """Return the node of every bundle. Waits until each has one: after the loss of a node, Ray places its bundles
        again."""
        while True:
            table = ray.util.placement_group_table(self._plan.group)
            if table["state"] == "CREATED":
                nodes: dict[int, str] = table["bundles_to_node_id"]
                return nodes
            await asyncio.sleep(PLACED_POLL_S)

    async def _phase(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        started = time.monotonic()
        result = await work()
        self._done = name
        self._log.took(name, time.monotonic() - started)
        return result

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call `method` on every rank at once. Raises the first failure, because later ones are mostly consequences."""
        per_worker = arguments if arguments is not None else [()] * len(self._workers)
        calls = [
            asyncio.ensure_future(awaited(getattr(worker, method).remote(*args)))
            for worker, args in zip(self._workers, per_worker, strict=True)
        ]
        done, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        for call in pending:
            call.add_done_callback(_retrieve)
        for rank, call in enumerate(calls):
            if call in done and call.exception() is not None:
                error = call.exception()
                where = f" ({self.locations[rank].process})" if self.locations else ""
                kind = StartRefusedError if is_refusal(error) else WorkerGroupError
                raise kind(f"rank {rank}{where}, {method}: {first_line(error)}") from error
        return [call.result() for call in calls]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def awaited(ref: Awaitable[T]) -> T:
    return await ref


def _retrieve(call: "asyncio.Future[Any]") -> None:
    """Mark a call's exception as retrieved, because its worker group is already dead."""
    with contextlib.suppress(asyncio.CancelledError):
        call.exception()


def is_refusal(error: BaseException | None) -> bool:
    """Return whether an actor's error is a refusal (ValueError), which another attempt would repeat."""
    cause = getattr(error, "cause", None) or error
    return isinstance(cause, ValueError) and not isinstance(cause, DeviceMemoryError)


def first_line(error: BaseException | None) -> str:
    """Return the type and first line of an actor's error."""
    cause = getattr(error, "cause", None) or error  # RayTaskError carries the worker's own exception
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0] if text else ''}"


class WorkerGroupError(RuntimeError):
    """A worker group could not be started, or lost a rank. The message names the first cause."""


class StartRefusedError(WorkerGroupError):
    """A rank cannot be built from this configuration, these checkpoints and this device, so another attempt would fail
    too."""
