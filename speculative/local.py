"""Local engines from a spec: in this process for one rank, in one child process per rank for several."""

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec
import torch

from speculative.build import EngineLayout, EngineSpec, build_worker, plan_layout
from workers.distributed.ports import free_port
from workers.runner.executor import StepExecutor
from workers.runner.local_engine import LocalEngine
from workers.scheduling.plan import StepPlan, StepResult
from workers.scheduling.scheduler import Scheduler

READY = b"ready"  # what a rank says once it is built; anything else is why it could not be


@contextlib.contextmanager
def local_engine(spec: EngineSpec) -> Iterator[LocalEngine]:
    """An engine that runs while the context is open. Raises what building a rank raises."""
    layout = plan_layout(spec)
    worker = spec.worker
    scheduler = Scheduler(
        worker.scheduler,
        worker.cache,
        layout.num_pages,
        layout.max_model_len,
        time.monotonic,
        layout.shapes,
        layout.lookahead,
    )
    if worker.tensor_parallel == 1:
        yield LocalEngine(scheduler, build_worker(spec, layout, 0, ""))
        return
    ranks = RankProcesses(spec, layout)
    try:
        yield LocalEngine(scheduler, ranks)
    finally:
        ranks.close()


class RankProcesses(StepExecutor):
    """All ranks as child processes; plans go to each, results are read from rank 0. Raises ValueError where a rank
    cannot be built."""

    def __init__(self, spec: EngineSpec, layout: EngineLayout) -> None:
        context = multiprocessing.get_context("spawn")
        address = f"tcp://127.0.0.1:{free_port()}"
        self._num_pending = 0
        self._decoder = msgspec.msgpack.Decoder(StepResult)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(spec.worker.tensor_parallel):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_rank, args=(spec, layout, rank, address, theirs), daemon=True)
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
        """Raises ValueError with the first rank's reason why it cannot be built."""
        for pipe in self._pipes:
            said = pipe.recv_bytes()
            if said != READY:
                raise ValueError(said.decode())

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


def _run_rank(spec: EngineSpec, layout: EngineLayout, rank: int, address: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        worker = build_worker(spec, layout, rank, address)
    except ValueError as error:
        pipe.send_bytes(str(error).encode())
        pipe.poll(None)  # until it is killed: leaving would be an error of its own to the other ranks
        return
    pipe.send_bytes(READY)
    decoder = msgspec.msgpack.Decoder(StepPlan)
    while True:
        try:
            plan = decoder.decode(pipe.recv_bytes())
        except EOFError:
            return
        worker.submit(plan)
        pipe.send_bytes(msgspec.msgpack.encode(worker.take()))
