"""An engine in this process, without transport: for tests, benchmarks and offline evaluation. It drives the scheduler
exactly as the cluster's coordinator does, two steps in flight."""

from collections.abc import Callable, Iterable, Sequence

from workers.runner.executor import StepExecutor
from workers.scheduling.plan import SamplingParams, StepResult
from workers.scheduling.request import Request, RequestOutput
from workers.scheduling.scheduler import Scheduler

Listener = Callable[[RequestOutput], None]


class LocalEngine:
    """Runs requests to their end. results: number of steps taken so far."""

    def __init__(self, scheduler: Scheduler, executor: StepExecutor) -> None:
        self.scheduler = scheduler
        self.executor = executor

    def step(self) -> list[RequestOutput]:
        """Send one plan if there is one, and read one result once two are pending or nothing else is to be done."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.executor.submit(plan)
        if self.executor.num_pending == 2 or (plan is None and self.executor.num_pending):
            return self.scheduler.apply(self._take())
        assert plan is not None or self.scheduler.num_waiting == 0, "requests wait but no step can run"
        return []

    def _take(self) -> StepResult:
        return self.executor.take()

    def run(self, requests: Iterable[Request], concurrency: int, listener: Listener = lambda output: None) -> None:
        """Run `requests` with at most `concurrency` at a time until all have finished."""
        waiting = list(requests)[::-1]
        running = 0
        while waiting or running:
            while waiting and running < concurrency:
                self.scheduler.submit(waiting.pop())
                running += 1
            for output in self.step():
                listener(output)
                running -= output.finish_reason is not None
        while self.executor.num_pending:
            self.scheduler.apply(self._take())

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        concurrency: int = 16,
    ) -> list[Request]:
        """The finished requests of `prompts`, in their order; one `sampling` for all, or one each."""
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        requests = [
            Request(f"local-{id(self):x}-{i}", list(prompt), params)
            for i, (prompt, params) in enumerate(zip(prompts, each, strict=True))
        ]
        self.run(requests, concurrency)
        return requests
