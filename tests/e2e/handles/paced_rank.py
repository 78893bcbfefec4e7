"""An engine whose ranks have no model and take a device's time, so that a server's latencies do not depend on how fast
this machine multiplies: the `engine_class` of an application.

Steps take `SLOWNESS` times what they take on one H200 (`tests.support.simulation.load.H200`): so the cores that clients
and server share with other work count `SLOWNESS` times less.
"""

import time

from aerie.cluster.plan import RankPlan
from aerie.cluster.replica import worker_actor
from aerie.cluster.replica.engine import Engine
from aerie.workers.config import PLAIN, RoundShapes
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.runner.executor import StepExecutor
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.plan import StepPlan, unpack_i32
from aerie.workers.scheduling.step_time import Step
from tests.e2e.scripted_rank import Report, ScriptedRank
from tests.support.scripted import ScriptedExecutor
from tests.support.simulation.load import H200

SLOWNESS = 12.0
SHAPES = RoundShapes((PLAIN,), default=0)


def slow_costs() -> CostTable:
    """The H200's times without speculation, `SLOWNESS` times as long."""
    plain = H200.rounds[0]
    slow = tuple(SLOWNESS * ms for ms in plain.ms)
    return CostTable(
        rounds=(RoundCosts(plain.num_requests, slow, tuple(SLOWNESS * ms for ms in plain.ms_per_kv_token)),),
        chunk_requests=H200.chunk_requests,
        chunk_tokens=H200.chunk_tokens,
        chunk_ms=tuple(tuple(SLOWNESS * ms for ms in row) for row in H200.chunk_ms),
        mixed_shapes=(0,) * len(H200.chunk_requests),
        ms_per_chunk_kv=SLOWNESS * H200.ms_per_chunk_kv,
    )


class PacedExecutor(ScriptedExecutor):
    """A step takes what `costs` says, after the one before it."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(SHAPES, num_slots, 4096)
        self.costs = slow_costs()
        self._free_s = 0.0  # when the device has done what it has

    def submit(self, plan: StepPlan) -> None:
        assert self.costs is not None
        slots = unpack_i32(plan.slots).tolist()
        tokens = [len(unpack_i32(chunk.tokens)) for chunk in plan.chunks]
        before = sum(count * chunk.start for count, chunk in zip(tokens, plan.chunks, strict=True))
        step = Step(
            plan.shape,
            len(slots),
            sum(self.slots[slot].seq_len for slot in slots),
            sum(tokens),
            before / max(1, sum(tokens)),
        )
        self.delay_s = self.costs.step_ms(*step) / 1000
        super().submit(plan)
        _, result = self._pending.pop()
        self._free_s = max(self._free_s, time.monotonic()) + self.delay_s
        self._pending.append((self._free_s, result))


class PacedRank(ScriptedRank):
    def layout(self) -> EngineLayout:
        return EngineLayout(
            shapes=SHAPES,
            scheduler=self._scheduler,
            cache=self._worker.cache,
            max_model_len=self._worker.model.max_model_len or 4096,
            max_position=self._worker.model.max_model_len or 4096,
            lookahead=0,
            graph_capture=self._worker.graph_capture,
            known_pages=self._worker.cache.num_pages or 4096,
        )

    def build(
        self, rendezvous: str, report: Report, former: EngineLayout | None = None, advance: object = None
    ) -> StepExecutor:
        report("paced", 0.0)
        return PacedExecutor(self._scheduler.num_slots)


class WorkerActor(worker_actor.WorkerActor):
    """Has the real class's name, by which its processes are found."""

    @staticmethod
    def preload(plan: RankPlan) -> None:
        """There is nothing to import."""

    @staticmethod
    def rank_builder(plan: RankPlan, rank: int) -> PacedRank:
        return PacedRank(plan, rank)


class PacedEngine(Engine):
    worker = WorkerActor
