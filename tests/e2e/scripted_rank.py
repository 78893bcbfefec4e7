"""A rank without a model for whole-path tests: named as the `factory` of an application."""

import time

from cluster.assembly import Layout, PhaseReport
from cluster.config import AerieConfig
from tests.support.scripted import ScriptedExecutor
from workers.config import PLAIN, RoundShape, RoundShapes
from workers.runner.executor import StepExecutor

TREE = RoundShape(name="tree", width=4, max_new_tokens=4, draft_tokens=2)


class ScriptedRank:
    """Tokens follow from seed and position alone; a step takes a few milliseconds."""

    device_name = "script"

    def __init__(self, config: AerieConfig, rank: int) -> None:
        self._config = config
        self._rank = rank

    def layout(self) -> Layout:
        return Layout(
            shapes=RoundShapes((PLAIN, TREE), default=1),
            num_pages=self._config.cache.num_pages or 256,
            max_model_len=self._config.model.max_model_len or 1024,
            lookahead=1,
            num_draft_tokens=3,
        )

    def build(self, rendezvous: str, report: PhaseReport) -> StepExecutor:
        assert rendezvous.startswith("tcp://")
        report("scripted", 0.0)
        time.sleep(0.05)
        return ScriptedExecutor(
            RoundShapes((PLAIN, TREE), default=1), self._config.scheduler.max_running, 4096, delay_s=0.01
        )
