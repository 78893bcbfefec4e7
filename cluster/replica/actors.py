"""The two Ray actors of an engine: `EagleCoordinator`, one, and `Worker`, one per tensor-parallel rank.

Thin: each builds what `cluster.assembly` describes and hands it to its loop. Actor calls are for life and death only;
plans, results and tokens travel by ZeroMQ.
"""

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
import zmq

from cluster.assembly import Layout, build_scheduler, load_factory
from cluster.config import AerieConfig, pin_network_interface, set_process_environment
from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.loop import CoordinatorSettings
from cluster.replica.worker_loop import run_worker_loop
from cluster.transport.channel import RankChannel
from cluster.transport.messages import EngineStats, FlushOutcome
from cluster.transport.sockets import Transport
from workers.distributed.ports import free_port

NAMESPACE = "aerie"  # of the coordinators' names, apart from Serve's own
LOOPBACK = "127.0.0.1"


def coordinator_prefix(application: str) -> str:
    """What the names of an application's coordinators begin with."""
    return f"coordinator:{application}:"


def find_coordinators(application: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Handles of an application's coordinators that live, by name; `known` ones are not looked up again. A Serve handle
    would reach one replica's only."""
    prefix = coordinator_prefix(application)
    found = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        if actor["namespace"] == NAMESPACE and name.startswith(prefix):
            with contextlib.suppress(ValueError):  # it died between the two calls
                found[name] = known.get(name) or ray.get_actor(name, namespace=NAMESPACE)
    return found


class EagleCoordinator:
    """The scheduler's loop in an actor. Starts empty, so that it can say "starting" while the workers load."""

    async def __init__(self, config: AerieConfig, engine_id: str, transport: Transport) -> None:  # type: ignore[misc]
        self._config = config
        self._engine_id = engine_id
        self._transport = transport
        self._coordinator: Coordinator | None = None
        self._loop = asyncio.get_running_loop()
        self._worker_group_lost: asyncio.Queue[str] = asyncio.Queue()
        self._death: asyncio.Future[str] = self._loop.create_future()

    async def open(self, layout: Layout) -> str:
        """Start the loop for engines of this layout; returns the inbox for `connect_engine`."""
        engine = self._config.engine
        coordinator = Coordinator(
            build_scheduler(self._config, layout),
            CoordinatorSettings(
                engine_id=self._engine_id,
                transport=self._transport,
                on_worker_loss=engine.on_worker_loss,
                max_resumes=engine.max_resumes,
                step_timeout_s=engine.step_timeout_s,
            ),
            on_worker_group_lost=lambda reason: self._tell(self._worker_group_lost.put_nowait, reason),
            on_death=lambda reason: self._tell(self._die, reason),
        )
        coordinator.start()
        self._coordinator = coordinator
        return coordinator.endpoint

    async def attach(self, endpoints: list[str], epoch: int) -> None:
        """Use a new worker group; what the former one was lost for is forgotten."""
        assert self._coordinator is not None
        self._worker_group_lost = asyncio.Queue()
        self._coordinator.attach(endpoints, epoch)

    async def detach(self, reason: str) -> None:
        assert self._coordinator is not None
        self._coordinator.detach(reason)

    async def worker_group_lost(self) -> str:
        """Waits until the attached worker group is lost; why."""
        return await self._worker_group_lost.get()

    async def death(self) -> str:
        """Waits until the loop itself fails; why. The actor's own death ends this call with an error."""
        return await self._death

    async def stats(self) -> bytes:
        """`EngineStats` as msgpack."""
        if self._coordinator is None:
            stats = EngineStats(engine_id=self._engine_id, status="starting")
        else:
            stats = await asyncio.to_thread(self._coordinator.stats)
        return msgspec.msgpack.encode(stats)

    async def flush_cache(self) -> bytes:
        """Empty the prefix cache, if no request is unfinished; `FlushOutcome` as msgpack."""
        if self._coordinator is None:
            outcome = FlushOutcome(self._engine_id)  # nothing has run yet
        else:
            outcome = await asyncio.to_thread(self._coordinator.flush_cache)
        return msgspec.msgpack.encode(outcome)

    async def drain(self) -> None:
        """Refuse new requests and wait until the others have ended; what takes longer than engine.drain_timeout_s ends
        with an error."""
        limit_s = self._config.engine.drain_timeout_s
        if self._coordinator is not None and not await asyncio.to_thread(self._coordinator.drain, limit_s):
            reason = f"the server is shutting down, and engine.drain_timeout_s={limit_s:g} is over"
            await asyncio.to_thread(self._coordinator.fail_all, reason)

    async def loop_age_s(self) -> float:
        """Seconds since the loop last came round; answers even if it hangs."""
        return 0.0 if self._coordinator is None else self._coordinator.health().loop_age_s

    def _tell(self, listener: Callable[[str], None], reason: str) -> None:
        self._loop.call_soon_threadsafe(listener, reason)

    def _die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs."""

    rank: int
    node_id: str
    address: str
    pid: int
    device: str


class Worker:
    """One rank. Its methods are called in the order in which they stand here; `run` lasts until the end."""

    def __init__(self, config: AerieConfig, rank: int, factory: str) -> None:
        set_process_environment(config.engine.threads_per_worker)
        self._rank = rank
        self._parts = load_factory(factory)(config, rank)

    def place(self) -> RankPlace:
        context = ray.get_runtime_context()
        return RankPlace(
            rank=self._rank,
            node_id=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            device=self._parts.device_name,
        )

    def layout(self) -> Layout:
        return self._parts.layout()

    def rendezvous(self, address: str) -> str:
        """A free port of this node; chosen anew for every worker group, because a killed one's may stay taken for a
        while."""
        return f"tcp://{address}:{free_port(address)}"

    def build(self, rendezvous: str, own_address: str) -> None:
        """Join the other ranks, load, allocate, warm up. Rank 0 prints each phase as it ends."""
        interface = interface_of(own_address)
        if interface is not None:
            pin_network_interface(interface)
        self._executor = self._parts.build(rendezvous, self._report)

    def listen(self, transport: Transport, name: str, epoch: int) -> str:
        """Bind the channel; returns the endpoint for the coordinator."""
        self._channel = RankChannel(zmq.Context(), transport, self._rank, epoch, f"{name}-{epoch}-{self._rank}")
        return self._channel.endpoint

    def run(self) -> str:
        """Execute plans until told to stop or until the coordinator is gone; says which."""
        return run_worker_loop(self._executor, self._channel)

    def _report(self, phase: str, seconds: float) -> None:
        if self._rank == 0:
            print(phase_line(phase, seconds), flush=True)


def phase_line(phase: str, seconds: float) -> str:
    """How a phase of the start is reported."""
    return f"{phase:<22}{seconds:6.1f} s"


def interface_of(address: str) -> str | None:
    """Name of this machine's interface with IPv4 `address`, or None (Linux: ioctl SIOCGIFADDR)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # the interface has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
