"""A scheduler and scripted ranks whose reports of grammars and masks a test decides."""

from typing import Any

import msgspec

from aerie.attention.config import CacheConfig
from aerie.workers.config import RoundShapes, SchedulerConfig
from aerie.workers.scheduling.plan import Grammar, SamplingParams, StepPlan, StepResult, pack_i32
from aerie.workers.scheduling.request import FinishReason, Request
from aerie.workers.scheduling.scheduler import Scheduler
from tests.support.scripted import ScriptedExecutor


class GrammarEngine:
    """compiled: numbers of the grammars that the ranks report as compiled."""

    def __init__(self) -> None:
        config, cache = SchedulerConfig(max_running=4, max_step_tokens=32), CacheConfig(page_size=4)
        self.scheduler = Scheduler(config, cache, 200, 400, lambda: 0.0)
        self.executor = ScriptedExecutor(RoundShapes(), 4, 200)
        self.compiled: list[int] = []

    def submit(self, name: str, grammar: Grammar | None, max_tokens: int = 50, seed: int = 0) -> Request:
        request = Request(name, [3, 4, 5], SamplingParams(max_tokens, seed=seed, grammar=grammar))
        self.scheduler.submit(request)
        return request

    def plan(self) -> StepPlan | None:
        """The next plan, sent to the ranks."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.executor.submit(plan)
        return plan

    def apply(self, result: StepResult, **changes: Any) -> list[FinishReason | None]:
        """Apply a result of the ranks with these fields changed. Return the finish reason of each output."""
        result = msgspec.structs.replace(result, grammars_ready=pack_i32(self.compiled), **changes)
        return [output.finish_reason for output in self.scheduler.apply(result)]

    def step(self, **changes: Any) -> tuple[StepPlan, list[FinishReason | None]]:
        """Run one step."""
        plan = self.plan()
        assert plan is not None
        return plan, self.apply(self.executor.take(), **changes)

    def slot(self, name: str) -> int:
        """The slot of a request; -1 while it waits."""
        sequence = self.scheduler.queues.find(name)
        assert sequence is not None
        return sequence.slot
