"""An engine without transport, for tests, benchmarks and offline use. Drives the scheduler as the cluster's coordinator
does, with two steps in flight.

    target = read_target_config(worker.model, worker.tensor_parallel)
    with local_engine(worker, plan_engine(worker, target)) as engine:
        requests = engine.generate(prompts, SamplingParams(64, 0.0))

`aerie.speculative.build.local_engine` does the same for an engine with a draft.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from aerie.workers.config import WorkerConfig
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.interrupt import interrupts_between_steps
from aerie.workers.runner.build import build_rank
from aerie.workers.runner.executor import StepExecutor
from aerie.workers.runner.layout import EnginePlan
from aerie.workers.runner.rank_processes import RankProcesses
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request, RequestOutput
from aerie.workers.scheduling.scheduler import Scheduler

_READING_S = 0.001

Listener = Callable[[RequestOutput], object]


class LocalEngine:
    """Runs requests to completion."""

    def __init__(self, scheduler: Scheduler, executor: StepExecutor) -> None:
        self.scheduler = scheduler
        self.executor = executor

    def step(self) -> list[RequestOutput]:
        """Submit the next plan, if there is one. Then take one result, if two are pending or there was no plan. If
        neither, carry out the next command, or wait for a moment while an adapter is read."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.executor.submit(plan)
        if self.executor.num_pending == 2 or (plan is None and self.executor.num_pending):
            return self.scheduler.apply(self.executor.take())
        if plan is None and (command := self.scheduler.next_command()) is not None:
            self.scheduler.command_answered(self.executor.carry_out(command))
            return []
        if plan is None and self.scheduler.adapters.is_loading:
            time.sleep(_READING_S)
            return []
        assert plan is not None or self.scheduler.num_waiting == 0, "requests wait but no step can run"
        return []

    def run(self, requests: Iterable[Request], concurrency: int, listener: Listener = lambda output: None) -> None:
        """Run `requests`, at most `concurrency` at a time, until all have finished.

        An exception or Ctrl-C aborts them. The engine stays usable.

        listener: called with each output of a step. If it returns true, that output's request is aborted.
        """
        requests = list(requests)
        waiting, running = requests[::-1], 0
        with interrupts_between_steps() as is_interrupted:
            try:
                while waiting or running:
                    while waiting and running < concurrency:
                        self.scheduler.submit(waiting.pop())
                        running += 1
                    for output in self.step():
                        ended = bool(listener(output)) and output.finish_reason is None
                        if ended:
                            self.scheduler.abort(output.request.request_id)
                        running -= ended or output.finish_reason is not None
                    if is_interrupted():
                        raise KeyboardInterrupt
            finally:
                for request in requests:
                    self.scheduler.abort(request.request_id)
                while self.executor.num_pending:
                    self.scheduler.apply(self.executor.take())

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        concurrency: int = 16,
    ) -> list[Request]:
        """Run one request per prompt. Return the finished requests in order. sampling: one for all prompts, or one per
        prompt."""
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        requests = [
            Request(f"local-{id(self):x}-{i}", list(prompt), params)
            for i, (prompt, params) in enumerate(zip(prompts, each, strict=True))
        ]
        self.run(requests, concurrency)
        return requests


@contextlib.contextmanager
def local_engine(worker: WorkerConfig, plan: EnginePlan, all_graphs: bool = True) -> Iterator[LocalEngine]:
    """Run an engine while the context is open. A single rank runs in this process, several in a child process each.

    all_graphs: capture all graphs at the start, regardless of `graph_capture.limit_s`, because this engine does not
        capture while idle.
    Raises ValueError as `build_rank` does.
    """
    if all_graphs:
        worker = replace(worker, graph_capture=replace(worker.graph_capture, limit_s=math.inf))
    if worker.tensor_parallel == 1:
        built = build_rank(worker, plan, 0, "")
        yield engine_of(built.layout, built.worker)
        return
    ranks = RankProcesses(worker, plan)
    try:
        yield engine_of(ranks.layout, ranks)
    finally:
        ranks.close()


def engine_of(layout: EngineLayout, executor: StepExecutor) -> LocalEngine:
    scheduler = Scheduler.of(layout, time.monotonic)
    scheduler.captures.graphs = executor.graphs
    if executor.costs is not None:
        scheduler.use_costs(executor.costs)
    return LocalEngine(scheduler, executor)
