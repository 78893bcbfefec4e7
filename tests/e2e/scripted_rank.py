"""An engine whose ranks have no model, for whole-path tests: the `engine_class` of an application."""

import time
from collections.abc import Callable

from aerie.cluster.plan import RankPlan
from aerie.cluster.replica import worker_actor
from aerie.cluster.replica.engine import Engine
from aerie.workers.config import PLAIN, RoundShape, RoundShapes
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.runner.executor import StepExecutor
from tests.support.scripted import ScriptedExecutor

Report = Callable[[str, float], None]

TREE = RoundShape(name="tree", width=4, max_new_tokens=4, draft_tokens=2)


class ScriptedRank:
    """Stands for `aerie.cluster.assembly.RankBuilder`. Tokens follow from seed and position alone; a step takes 10
    ms."""

    device_name = "script"

    def __init__(self, plan: RankPlan, rank: int) -> None:
        self._worker = plan.worker
        self._rank = rank
        scheduler = plan.worker.scheduler.resolved("cpu")
        self._scheduler = scheduler.with_slots(32) if scheduler.max_running == "auto" else scheduler

    def layout(self) -> EngineLayout:
        return EngineLayout(
            shapes=RoundShapes((PLAIN, TREE), default=1),
            scheduler=self._scheduler,
            cache=self._worker.cache,
            max_model_len=self._worker.model.max_model_len or 1024,
            max_position=self._worker.model.max_model_len or 1024,
            lookahead=1,
            graph_capture=self._worker.graph_capture,
            known_pages=self._worker.cache.num_pages or 256,
        )

    def build(
        self, rendezvous: str, report: Report, former: EngineLayout | None = None, advance: object = None
    ) -> StepExecutor:
        assert rendezvous.startswith("tcp://")
        report("scripted", 0.0)
        time.sleep(0.05)
        return ScriptedExecutor(RoundShapes((PLAIN, TREE), default=1), self._scheduler.num_slots, 4096, delay_s=0.01)


class WorkerActor(worker_actor.WorkerActor):
    """Has the real class's name, by which its processes are found."""

    @staticmethod
    def preload(plan: RankPlan) -> None:
        """There is nothing to import."""

    @staticmethod
    def rank_builder(plan: RankPlan, rank: int) -> ScriptedRank:
        return ScriptedRank(plan, rank)


class ScriptedEngine(Engine):
    worker = WorkerActor


class SlowWorker(WorkerActor):
    @staticmethod
    def rank_builder(plan: RankPlan, rank: int) -> ScriptedRank:
        time.sleep(10)
        return ScriptedRank(plan, rank)


class SlowEngine(Engine):
    """Its model takes long to load."""

    worker = SlowWorker
