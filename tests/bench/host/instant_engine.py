"""An engine whose model takes no time: the `engine_class` of `tests.bench.host.instant_server`'s application."""

from collections.abc import Callable

from aerie.cluster.plan import RankPlan
from aerie.cluster.replica import worker_actor
from aerie.cluster.replica.engine import Engine
from aerie.workers.config import PLAIN, RoundShapes
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.runner.executor import StepExecutor
from tests.bench.host.coordinator import TREE
from tests.bench.host.instant_server import PacedExecutor

Report = Callable[[str, float], None]


class InstantRank:
    """Stands for `aerie.cluster.assembly.RankBuilder`, without a model."""

    device_name = "none"

    def __init__(self, plan: RankPlan, rank: int) -> None:
        self._worker = plan.worker

    def layout(self) -> EngineLayout:
        cache = self._worker.cache
        assert cache.num_pages is not None
        length = self._worker.model.max_model_len or 2048
        return EngineLayout(
            shapes=RoundShapes((PLAIN, TREE), default=1),
            scheduler=self._worker.scheduler.resolved("cpu"),
            cache=cache,
            max_model_len=length,
            max_position=length,
            lookahead=1,
            known_pages=cache.num_pages,
        )

    def build(
        self, rendezvous: str, report: Report, former: EngineLayout | None = None, advance: object = None
    ) -> StepExecutor:
        return PacedExecutor(self._worker.scheduler.num_slots)


class WorkerActor(worker_actor.WorkerActor):
    """Has the real class's name, by which its processes are counted."""

    @staticmethod
    def rank_builder(plan: RankPlan, rank: int) -> InstantRank:
        return InstantRank(plan, rank)


class InstantEngine(Engine):
    worker = WorkerActor
