"""An engine without transport, for tests, benchmarks and offline use; ranks besides the first are child processes.
Drives the scheduler as the cluster's coordinator does, with two steps in flight.

    target = read_target_config(worker.model, worker.tensor_parallel)
    with local_engine(worker, plan_engine(worker, target)) as engine:
        requests = engine.generate(prompts, SamplingParams(64, 0.0))

`aerie.speculative.build.local_engine` does the same for an engine with a draft.
"""

import contextlib
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import msgspec
import torch

from aerie.kernels.capability import Capability
from aerie.workers.config import WorkerConfig
from aerie.workers.device import resolve_device
from aerie.workers.distributed.ports import free_port
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.interrupt import interrupts_between_steps
from aerie.workers.runner.build import build_rank
from aerie.workers.runner.executor import StepExecutor
from aerie.workers.runner.graphs.compile_jobs import CompileProcesses
from aerie.workers.runner.graphs.kernel_compilation import compile_processes
from aerie.workers.runner.layout import EnginePlan
from aerie.workers.scheduling.commands.command import Command, CommandAnswer
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.plan import GraphCount, SamplingParams, StepPlan, StepResult
from aerie.workers.scheduling.request import Request, RequestOutput
from aerie.workers.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class Ready:
    """Sent by a rank that is built. A rank that cannot be built sends the reason, a str."""

    layout: EngineLayout
    costs: CostTable | None
    graphs: GraphCount


class RankProcesses:
    """Implements `aerie.workers.runner.executor.StepExecutor`. Plans go to every rank; the result of rank 0 is
    returned.

    layout: layout of the built ranks.
    Raises ValueError if a rank cannot be built.
    """

    def __init__(self, worker: WorkerConfig, plan: EnginePlan) -> None:
        context = multiprocessing.get_context("spawn")
        address = f"tcp://127.0.0.1:{free_port()}"
        self.costs: CostTable | None = None
        self.graphs = GraphCount()
        self.layout = plan.layout
        self._num_pending = 0
        self._decoder = msgspec.msgpack.Decoder(StepResult)
        self._answers = msgspec.msgpack.Decoder(CommandAnswer)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(worker.tensor_parallel):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_rank, args=(worker, plan, rank, address, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._wait_ready()
        except ValueError:
            for process in self._processes:
                process.kill()
            self.close()
            raise

    def _wait_ready(self) -> None:
        """Wait until all ranks are built. Raises ValueError with the reason of the first rank that cannot be."""
        for rank, pipe in enumerate(self._pipes):
            try:
                message = pipe.recv()
            except EOFError:
                raise ValueError(
                    f"rank {rank} ended while it was built; its error is above. A script must build an engine of "
                    'several ranks under `if __name__ == "__main__":`, because each rank imports the script'
                ) from None
            if not isinstance(message, Ready):
                raise ValueError(message)
            assert self.costs in (None, message.costs), "ranks have different cost tables"
            self.layout, self.costs, self.graphs = message.layout, message.costs, message.graphs

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def ready(self) -> bool:
        return self._pipes[0].poll()

    def submit(self, plan: StepPlan) -> None:
        self._send(plan)
        self._num_pending += 1

    def take(self) -> StepResult:
        results = [pipe.recv_bytes() for pipe in self._pipes]
        self._num_pending -= 1
        result = self._decoder.decode(results[0])
        self.graphs = result.graphs
        return result

    def carry_out(self, command: Command) -> tuple[CommandAnswer, ...]:
        self._send(command)
        return tuple(self._answers.decode(pipe.recv_bytes()) for pipe in self._pipes)

    def _send(self, message: StepPlan | Command) -> None:
        raw = msgspec.msgpack.encode(message)
        for pipe in self._pipes:
            pipe.send_bytes(raw)

    def close(self) -> None:
        """End the child processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            process.kill()


def run_rank(worker: WorkerConfig, engine: EnginePlan, rank: int, address: str, pipe: Connection) -> None:
    """Build a rank in this child process, then answer plans and commands from `pipe` until it closes. The first message
    sent is `Ready`, or the text of an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends SIGINT to children, too; the parent ends them
    torch.set_num_threads(max(1, torch.get_num_threads() // worker.tensor_parallel))
    try:
        built = build_rank(worker, engine, rank, address, compilers=_compilers(worker, rank))
    except ValueError as error:
        pipe.send(str(error))
        pipe.poll(None)  # wait to be killed, because an exit would raise errors in the other ranks
        return
    executor = built.worker
    pipe.send(Ready(built.layout, executor.costs, executor.graphs))
    decoder: msgspec.msgpack.Decoder[StepPlan | Command] = msgspec.msgpack.Decoder(StepPlan | Command)
    while True:
        try:
            message = decoder.decode(pipe.recv_bytes())
        except EOFError:
            return
        answer: StepResult | CommandAnswer
        if isinstance(message, Command):
            (answer,) = executor.carry_out(message)
        else:
            executor.submit(message)
            answer = executor.take()
        pipe.send_bytes(msgspec.msgpack.encode(answer))


def _compilers(worker: WorkerConfig, rank: int) -> CompileProcesses | None:
    """Start processes that compile a GPU rank's kernels: threads take three to four times as long."""
    runs_kernels = Capability.of(resolve_device(worker.model.device, rank)).runs_kernels
    return compile_processes(worker.tensor_parallel) if worker.cuda_graphs and runs_kernels else None


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
        samplings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        requests = [
            Request(f"local-{id(self):x}-{i}", list(prompt), params)
            for i, (prompt, params) in enumerate(zip(prompts, samplings, strict=True))
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
        built = build_rank(worker, plan, 0, "", compilers=_compilers(worker, 0))
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
