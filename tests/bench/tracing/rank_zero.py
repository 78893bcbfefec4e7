"""A tensor-parallel engine whose rank 0 runs in this process, so that torch's profiler here sees that rank's kernels.

Used by `tests.bench.profile_round`. Its other ranks are child processes, as in `aerie.workers.runner.local_engine`.
"""

import contextlib
import math
import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import msgspec

from aerie.speculative.build import EngineSpec, plan_engine
from aerie.workers.distributed.ports import free_port
from aerie.workers.runner.build import build_rank
from aerie.workers.runner.local_engine import LocalEngine, engine_of, run_rank
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.commands.command import Command, CommandAnswer
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.plan import GraphCount, StepPlan, StepResult


class RankZero:
    """Implements `aerie.workers.runner.executor.StepExecutor`: plans go to the rank here and to the pipes of the
    others."""

    def __init__(self, own: Worker, pipes: list[Connection]) -> None:
        self._own = own
        self._pipes = pipes

    @property
    def costs(self) -> CostTable | None:
        return self._own.costs

    @property
    def graphs(self) -> GraphCount:
        return self._own.graphs

    @property
    def num_pending(self) -> int:
        return self._own.num_pending

    def ready(self) -> bool:
        return self._own.ready()

    def submit(self, plan: StepPlan) -> None:
        self._send(plan)
        self._own.submit(plan)

    def carry_out(self, command: Command) -> tuple[CommandAnswer, ...]:
        self._send(command)
        answers = self._own.carry_out(command)
        return answers + tuple(msgspec.msgpack.decode(pipe.recv_bytes(), type=CommandAnswer) for pipe in self._pipes)

    def _send(self, message: StepPlan | Command) -> None:
        raw = msgspec.msgpack.encode(message)
        for pipe in self._pipes:
            pipe.send_bytes(raw)

    def take(self) -> StepResult:
        for pipe in self._pipes:
            pipe.recv_bytes()
        return self._own.take()


@contextlib.contextmanager
def engine_with_rank_zero(spec: EngineSpec) -> Iterator[LocalEngine]:
    """Run the engine of `spec` while the context is open, with all graphs captured at the start. Raises ValueError as
    `build_rank` does."""
    worker = replace(spec.worker, graph_capture=replace(spec.worker.graph_capture, limit_s=math.inf))
    plan = plan_engine(spec)
    context = multiprocessing.get_context("spawn")
    address = f"tcp://127.0.0.1:{free_port()}"
    pipes, processes = [], []
    for rank in range(1, worker.tensor_parallel):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(worker, plan, rank, address, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        built = build_rank(worker, plan, 0, address if worker.tensor_parallel > 1 else "")
        for pipe in pipes:
            if isinstance(message := pipe.recv(), str):  # else `Ready`
                raise ValueError(message)
        yield engine_of(built.layout, RankZero(built.worker, pipes))
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(timeout=10)
            process.kill()
