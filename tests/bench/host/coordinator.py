"""The cost of a step without a model: `python -m tests.bench cpu --only coordinator`.

A coordinator, two rank processes whose executor answers at once, an ingress process that reads the tokens. A step is
schedule, plan to both ranks, result of rank 0, apply, and one token message; the time between two results is measured
with two steps in flight, as in service.
"""

import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from aerie.attention.config import CacheConfig
from aerie.cluster.coordinator.coordinator import Coordinator
from aerie.cluster.coordinator.loop import CoordinatorSettings
from aerie.cluster.replica.worker_loop import run_worker_loop
from aerie.cluster.transport.channel import RankChannel, connect_engine
from aerie.cluster.transport.encoding import decode_numbered, encode
from aerie.cluster.transport.messages import GenerateRequest, TokenBatch
from aerie.cluster.transport.sockets import Transport
from aerie.deploy.bench.figures import table
from aerie.kernels.slots.finish import FINISH_LENGTH
from aerie.workers.config import PLAIN, RoundShape, RoundShapes, SchedulerConfig
from aerie.workers.scheduling.commands.command import Command, CommandAnswer
from aerie.workers.scheduling.cost_table import CostTable
from aerie.workers.scheduling.plan import GraphCount, SamplingParams, StepPlan, StepResult, pack_i32, unpack_i32
from aerie.workers.scheduling.request import RequestOutput
from aerie.workers.scheduling.scheduler import Scheduler
from tests.bench.host.finding import Finding, Report

TREE = RoundShape(name="tree", width=16, max_new_tokens=6, draft_tokens=2)
TOKENS_PER_ROUND = 3
WARM_UP_STEPS = 200
NUM_RANKS, PAGE_SIZE = 2, 16


class InstantExecutor:
    """Every round emits TOKENS_PER_ROUND tokens; requests end at their length. Costs a few microseconds per step."""

    def __init__(self, num_slots: int) -> None:
        self.costs: CostTable | None = None
        self.graphs = GraphCount()
        self._left = np.zeros(num_slots, np.int64)
        self._results: list[StepResult] = []
        self._usual: tuple[bytes, bytes, bytes, bytes] = (b"", b"", b"", b"")  # what full rounds of `_slots` bring
        self._slots = b""
        self._num_usual = 0  # such rounds that may come before a request can end
        self._num_owed = 0  # such rounds not yet taken from `_left`

    @property
    def num_pending(self) -> int:
        return len(self._results)

    def ready(self) -> bool:
        return bool(self._results)

    def take(self) -> StepResult:
        return self._results.pop(0)

    def carry_out(self, command: Command) -> tuple[CommandAnswer, ...]:
        raise AssertionError("no graph waits")

    def submit(self, plan: StepPlan) -> None:
        if not plan.chunks and plan.slots == self._slots and self._num_usual > 0:
            self._num_usual -= 1
            self._num_owed += 1
        else:
            self._usual = self._emit(plan)
        self._results.append(StepResult(plan.epoch, plan.step, *self._usual))

    def _emit(self, plan: StepPlan) -> tuple[bytes, bytes, bytes, bytes]:
        self._left[unpack_i32(self._slots)] -= TOKENS_PER_ROUND * self._num_owed
        for init in plan.inits:
            self._left[init.slot] = init.max_len - init.prompt_len
        rounds = unpack_i32(plan.slots)
        last = [chunk.slot for chunk in plan.chunks if chunk.next_token == -1]
        slots = np.concatenate((rounds, np.asarray(last, np.int32)))
        is_round = np.arange(len(slots)) < len(rounds)
        counts = np.minimum(np.where(is_round, TOKENS_PER_ROUND, 1), self._left[slots])
        finish = np.where(counts == self._left[slots], FINISH_LENGTH, 0) * (counts > 0)
        self._left[slots] -= counts
        self._slots, self._num_owed = plan.slots, 0
        pure = not plan.chunks and len(rounds) > 0
        self._num_usual = int(self._left[rounds].min()) // TOKENS_PER_ROUND - 1 if pure else 0
        return (
            pack_i32(counts.astype(np.int32)),
            bytes(4 * int(counts.sum())),
            finish.astype(np.uint8).tobytes(),
            pack_i32(np.where(is_round, TOKENS_PER_ROUND - 1, -1).astype(np.int32)),
        )


class TimedScheduler(Scheduler):
    """Stamps each result: wall clock, and CPU of the coordinator's thread."""

    stamps: list[tuple[float, float]] = []

    def apply(self, result: StepResult) -> list[RequestOutput]:
        self.stamps.append((time.perf_counter(), time.thread_time()))
        return super().apply(result)


def run_rank(folder: str, rank: int, num_slots: int, pipe: Connection) -> None:
    context = zmq.Context()
    channel = RankChannel(context, Transport(folder=folder), rank, 1, f"r{rank}")
    pipe.send(channel.endpoint)
    run_worker_loop(InstantExecutor(num_slots), channel)
    channel.close()
    context.term()


def run_ingress(num_running: int, max_tokens: int, pipe: Connection) -> None:
    """Sends the requests, reads until told to stop, then decodes and reports messages and tokens. It decodes late
    because an ingress has cores of its own in service; here it would share two with the coordinator and the ranks."""
    context = zmq.Context()
    socket, monitor = connect_engine(context, Transport(), pipe.recv())
    for i in range(num_running):
        prompt = pack_i32([(i * 31 + j) % 1000 for j in range(64)])
        sampling = SamplingParams(max_tokens=max_tokens, seed=i)
        socket.send(encode(GenerateRequest(f"request-{i:04}", prompt, sampling)))
    raws: list[bytes] = []
    while not pipe.poll():
        while socket.poll(100):
            raws.append(socket.recv())
    messages = [decode_numbered(raw, number) for number, raw in enumerate(raws)]
    batches = [message for message in messages if isinstance(message, TokenBatch)]
    pipe.send((len(raws), sum(len(delta.tokens) for batch in batches for delta in batch.deltas)))
    monitor.close()
    socket.close()
    context.term()


def spread(milliseconds: np.ndarray) -> dict[str, float]:
    figures = {
        "mean": milliseconds.mean(),
        "median": np.median(milliseconds),
        "p99": np.percentile(milliseconds, 99),
        "max": milliseconds.max(),
    }
    return {name: round(float(value), 4) for name, value in figures.items()}


def measure(num_running: int, num_steps: int) -> dict[str, Any]:
    """Times between results, and the coordinator's CPU time, over `num_steps` steps of `num_running` requests."""
    max_tokens = (num_steps + WARM_UP_STEPS) * TOKENS_PER_ROUND
    length = 64 + max_tokens + 64
    scheduler = TimedScheduler(
        SchedulerConfig(max_running=num_running, max_step_tokens=64 * num_running, max_waiting=num_running),
        CacheConfig(page_size=PAGE_SIZE),
        num_running * (length // PAGE_SIZE + 2),
        length,
        time.monotonic,
        RoundShapes((PLAIN, TREE), default=1),
        1,
    )
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="aerie") as folder:
        pipes, children = [], []
        for target, args in [(run_rank, (folder, rank, num_running)) for rank in range(NUM_RANKS)] + [
            (run_ingress, (num_running, max_tokens))
        ]:
            ours, theirs = spawn.Pipe()
            children.append(spawn.Process(target=target, args=(*args, theirs), daemon=True))
            children[-1].start()
            pipes.append(ours)
        endpoints = [pipe.recv() for pipe in pipes[:-1]]
        coordinator = Coordinator(scheduler, CoordinatorSettings("bench", Transport(folder=folder)))
        coordinator.start()
        pipes[-1].send(coordinator.endpoint)
        while coordinator.stats().num_waiting < num_running:
            time.sleep(0.01)
        coordinator.attach(endpoints, 1)
        deadline_s = time.monotonic() + 120
        while sum((stats := coordinator.stats()).scheduler.finished.values()) < num_running:
            assert time.monotonic() < deadline_s, "the requests did not end"
            time.sleep(0.1)
        time.sleep(0.3)
        pipes[-1].send("stop")
        num_messages, num_tokens = pipes[-1].recv()
        coordinator.stop()
        for child in children:
            child.join(5)
    assert num_tokens == num_running * max_tokens, "tokens were lost on the way"
    stamps = np.array(scheduler.stamps)[WARM_UP_STEPS:-5]  # without the steps in which all requests end at once
    return {
        "step_ms": spread(np.diff(stamps[:, 0]) * 1e3),
        "coordinator_cpu_ms": spread(np.diff(stamps[:, 1]) * 1e3),
        "num_running": num_running,
        "num_ranks": NUM_RANKS,
        "page_size": PAGE_SIZE,
        "num_steps": stats.scheduler.num_steps,
        "token_messages": num_messages,
    }


def run(quick: bool) -> Report:
    """One run of 3,000 steps; 300 if `quick`."""
    num_running, num_steps = (8, 300) if quick else (128, 3000)
    figures = measure(num_running, num_steps)
    columns = ["mean", "median", "p99", "max"]
    step, cpu = figures["step_ms"], figures["coordinator_cpu_ms"]
    rows = [("step", *(step[c] for c in columns)), ("CPU of the coordinator", *(cpu[c] for c in columns))]
    return Report(
        {
            "coordinator_step_median": Finding(step["median"], 0.5, "ms"),
            "coordinator_step_p99": Finding(step["p99"], 2.0, "ms"),
        },
        [
            f"{num_running} running requests, {NUM_RANKS} ranks, {figures['num_steps']} steps",
            "",
            *table(["ms", *columns], rows),
        ],
        figures,
    )
