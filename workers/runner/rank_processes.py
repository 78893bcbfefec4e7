"""Ranks of a local engine as child processes. Used by `aerie.workers.runner.local_engine`."""

import multiprocessing
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec
import torch

from aerie.workers.config import WorkerConfig
from aerie.workers.distributed.ports import free_port
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.runner.build import build_rank
from aerie.workers.runner.layout import EnginePlan
from aerie.workers.scheduling.commands.command import Command, CommandAnswer
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.plan import GraphCount, StepPlan, StepResult


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
        for pipe in self._pipes:
            message = pipe.recv()
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends SIGINT to children, too; the parent ends them
    torch.set_num_threads(max(1, torch.get_num_threads() // worker.tensor_parallel))
    try:
        built = build_rank(worker, engine, rank, address)
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
