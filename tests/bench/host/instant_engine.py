"""An engine whose model takes no time: the `engine_class` of `tests.bench.host.instant_server`'s application."""

from cluster.assembly import Layout, PhaseReport
from cluster.config import AerieConfig
from cluster.replica import worker_actor
from cluster.replica.engine import Engine
from tests.bench.host.coordinator import TREE
from tests.bench.host.instant_server import PacedExecutor
from workers.config import PLAIN, RoundShapes
from workers.runner.executor import StepExecutor


class InstantRank:
    """Stands for `cluster.assembly.RankBuilder`, without a model."""

    device_name = "none"

    def __init__(self, config: AerieConfig, rank: int) -> None:
        self._config = config

    def layout(self) -> Layout:
        cache = self._config.cache
        assert cache.num_pages is not None
        length = self._config.model.max_model_len or 2048
        return Layout(
            RoundShapes((PLAIN, TREE), default=1),
            cache.num_pages,
            length,
            lookahead=1,
            scheduler=self._config.scheduler.resolved("cpu"),
        )

    def build(
        self, rendezvous: str, report: PhaseReport, former: Layout | None = None, advance: object = None
    ) -> StepExecutor:
        return PacedExecutor(self._config.scheduler.num_slots)


class Worker(worker_actor.Worker):
    """Of the same name, by which its processes are counted."""

    @staticmethod
    def rank_builder(config: AerieConfig, rank: int) -> InstantRank:
        return InstantRank(config, rank)


class InstantEngine(Engine):
    worker = Worker
