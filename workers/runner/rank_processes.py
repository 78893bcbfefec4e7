"""The ranks of a local engine as child processes of this one. Used by `workers.runner.local_engine`."""

import multiprocessing
from multiprocessing.connection import Connection

import msgspec
import torch

from workers.config import WorkerConfig
from workers.distributed.ports import free_port
from workers.runner.build import build_rank
from workers.runner.executor import StepExecutor
from workers.runner.layout import EngineLayout
from workers.scheduling.plan import StepPlan, StepResult


class RankProcesses(StepExecutor):
    """Plans go to every rank, results are read from rank 0. Raises ValueError where a rank cannot be built.

    layout: as the ranks were built.
    """

    def __init__(self, worker: WorkerConfig, layout: EngineLayout) -> None:
        context = multiprocessing.get_context("spawn")
        address = f"tcp://127.0.0.1:{free_port()}"
        self._num_pending = 0
        self._decoder = msgspec.msgpack.Decoder(StepResult)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(worker.tensor_parallel):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_rank, args=(worker, layout, rank, address, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self.layout = self._built()
        except ValueError:
            for process in self._processes:
                process.kill()
            self.close()
            raise

    def _built(self) -> EngineLayout:
        """Once all are ready; they agree. Raises ValueError with the first rank's reason why it cannot be built."""
        layouts = []
        for pipe in self._pipes:
            said: EngineLayout | str = pipe.recv()
            if isinstance(said, str):
                raise ValueError(said)
            layouts.append(said)
        return layouts[0]

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def ready(self) -> bool:
        return self._pipes[0].poll()

    def submit(self, plan: StepPlan) -> None:
        raw = msgspec.msgpack.encode(plan)
        for pipe in self._pipes:
            pipe.send_bytes(raw)
        self._num_pending += 1

    def take(self) -> StepResult:
        results = [pipe.recv_bytes() for pipe in self._pipes]
        self._num_pending -= 1
        return self._decoder.decode(results[0])

    def close(self) -> None:
        """End the child processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            process.kill()


def _run_rank(worker: WorkerConfig, layout: EngineLayout, rank: int, address: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        rank_built = build_rank(worker, layout, rank, address)
    except ValueError as error:
        pipe.send(str(error))
        pipe.poll(None)  # until it is killed: leaving would be an error of its own to the other ranks
        return
    pipe.send(rank_built.layout)
    built = rank_built.worker
    decoder = msgspec.msgpack.Decoder(StepPlan)
    while True:
        try:
            plan = decoder.decode(pipe.recv_bytes())
        except EOFError:
            return
        built.submit(plan)
        pipe.send_bytes(msgspec.msgpack.encode(built.take()))
