"""`WorkerActor`: the Ray actor of one tensor-parallel rank. Created by `aerie.cluster.replica.worker_group`.

Actor calls only build the rank and start its loop; plans and results travel by ZeroMQ.
"""

import gc
import os
import socket
import time
from typing import TYPE_CHECKING

import ray

from aerie.cluster.environment import (
    pin_network_interface,
    prestart_folder,
    set_process_environment,
    set_visible_devices,
    visible_devices,
)
from aerie.cluster.linux import address_of_interface, raise_open_files
from aerie.cluster.placement import RankLocation
from aerie.cluster.plan import RankPlan
from aerie.cluster.replica.rank_process import RANK_BUILDER, AttachedRank, RankFacts, attach
from aerie.cluster.replica.worker_loop import idle_work_of, open_channel, run_worker_loop, use_cpu_settings
from aerie.cluster.start_log import RankLog, use_logs
from aerie.cluster.transport.sockets import Transport
from aerie.kernels.lazy_import import load
from aerie.workers.distributed.ports import free_port
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.scheduling.cost_table import CostTable

if TYPE_CHECKING:
    from aerie.cluster.assembly import RankBuilder


class WorkerActor:
    """One rank. Its methods are called in their order here; `run` returns at the end."""

    def __init__(self, plan: RankPlan, rank: int | None) -> None:
        """rank: None for a spare, which has imported a rank's modules and waits for `take_rank`."""
        set_process_environment(plan.threads)
        raise_open_files()
        self._plan = plan
        self._attached: AttachedRank | None = None
        if rank is None:
            self.preload(plan)
        else:
            self._log = RankLog(rank)
            self._log.done("actor began")
            self._become(rank, may_be_prestarted=True)

    @staticmethod
    def preload(plan: RankPlan) -> None:
        """Import the modules of `rank_builder` and of its rank, without touching a device."""
        load(RANK_BUILDER)

    @staticmethod
    def rank_builder(plan: RankPlan, rank: int) -> "RankBuilder":
        """Return the function that builds this worker's rank; imports torch."""
        builder: RankBuilder = load(RANK_BUILDER)(plan, rank)
        return builder

    def take_rank(self, rank: int, devices: str | None) -> None:
        """Turn a spare into a rank. devices: the previous rank's visible GPUs."""
        set_visible_devices(devices)
        self._log = RankLog(rank, time.time())
        self._become(rank)

    def location(self) -> RankLocation:
        """Return where this rank runs."""
        if self._attached is None:
            facts = RankFacts(os.getpid(), self._builder.device_name, visible_devices())
        else:
            facts = self._attached.facts()
        return RankLocation(
            rank=self._rank,
            node_id=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            pid=facts.pid,
            device=facts.device,
            visible_devices=facts.visible_devices,
            is_prestarted=self._attached is not None,
        )

    def rendezvous(self, address: str) -> str:
        """Return a free port of this node. Each worker group uses a new one, because a killed group's port may stay in
        use for a while."""
        return f"tcp://{address}:{free_port(address)}"

    def build(
        self, rendezvous: str, own_address: str, former: EngineLayout | None
    ) -> tuple[EngineLayout, CostTable | None]:
        """Join the other ranks, load, allocate and warm up. Return the rank's facts, and step times if they were
        measured. Rank 0 prints each phase. A rank that was started ahead has joined already.

        former: facts of the ranks that these replace, None without."""
        if self._attached is not None:
            return self._attached.build()
        gc.freeze()  # measuring memory runs the collector twenty times, which takes 0.3 s each if it scans the imports
        for _, interface in socket.if_nameindex():
            if address_of_interface(interface) == own_address:
                pin_network_interface(interface)
        self._executor = self._builder.build(rendezvous, self._log.phase, former, self._log.advance)
        gc.freeze()  # exclude model and graphs from collections while requests run
        return self._builder.layout(), self._executor.costs

    def listen(self, transport: Transport, name: str, epoch: int) -> str:
        """Bind the channel; returns the endpoint for the coordinator."""
        if self._attached is not None:
            return self._attached.listen(transport, name, epoch)
        self._channel = open_channel(transport, name, self._rank, epoch)
        return self._channel.endpoint

    def run(self) -> str:
        """Execute plans until a `Stop` comes or the coordinator is lost; returns which."""
        if self._attached is not None:
            return self._attached.run()
        return run_worker_loop(self._executor, self._channel, idle_work=idle_work_of(self._plan.uses_gpus))

    def _become(self, rank: int, may_be_prestarted: bool = False) -> None:
        """Take a rank: attach to the process that was started ahead for it, or prepare to build it here."""
        self._rank = rank
        use_logs(self._plan.log_format, f"rank {rank}")
        if may_be_prestarted:
            self._attached = attach(prestart_folder(), self._plan, rank)
            if self._attached is not None:
                self._log.done("took the rank started ahead")
        if self._attached is None:
            if not self._plan.uses_gpus:
                use_cpu_settings()
            self._builder = self.rank_builder(self._plan, rank)
            self._log.done("device opened")
