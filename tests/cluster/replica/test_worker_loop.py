"""The ranks' loop against a coordinator's end of the link."""

import ctypes
import sys
import threading
import time
from collections import deque

import psutil
import pytest
import zmq

from aerie.cluster.linux import trim_heap
from aerie.cluster.replica.worker_loop import run_worker_loop
from aerie.cluster.transport.channel import RankChannel, RankLink
from aerie.cluster.transport.encoding import encode
from aerie.cluster.transport.messages import Heartbeat, RankFailure, Stop
from aerie.cluster.transport.sockets import Transport
from aerie.workers.scheduling.plan import GraphCount, StepPlan, StepResult
from tests.support.cluster import until


class Recorder:
    """An executor whose steps are done when the test says so."""

    def __init__(self):
        self.costs = None
        self.graphs = GraphCount()
        self.done = threading.Event()
        self.done.set()
        self.most_pending = 0
        self.plans = []
        self._pending = deque()

    @property
    def num_pending(self):
        return len(self._pending)

    def ready(self):
        return self.done.is_set()

    def submit(self, plan):
        self.plans.append(plan)
        self._pending.append(plan)
        self.most_pending = max(self.most_pending, len(self._pending))

    def take(self):
        plan = self._pending.popleft()
        return StepResult(plan.epoch, plan.step, b"", b"", b"", b"")


class Bench:
    def __init__(self, folder, rank):
        self.context = zmq.Context()
        transport = Transport(folder=str(folder))
        self.executor = Recorder()
        self.channel = RankChannel(self.context, transport, rank, 1, "r")
        self.link = RankLink(self.context, transport, self.channel.endpoint, rank)
        self.end = None
        self.idle_work = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.messages = []

    def _run(self):
        try:
            self.end = run_worker_loop(
                self.executor, self.channel, idle_work=lambda: self.idle_work.append(time.monotonic())
            )
        except Exception as error:
            self.end = error
        self.channel.close()

    def send(self, *steps):
        for step in steps:
            self.link.send(encode(StepPlan(1, step, b"", 0, 0)))

    def read(self, kind):
        """Messages of one kind so far."""
        while (message := self.link.receive()) is not None:
            self.messages.append(message)
        return [message for message in self.messages if isinstance(message, kind)]

    def close(self):
        if not self.link.socket.closed:
            self.link.close()
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.context.destroy(linger=0)


@pytest.fixture
def make_bench(tmp_path):
    benches = []

    def make(rank=0):
        benches.append(Bench(tmp_path, rank))
        benches[-1].thread.start()
        return benches[-1]

    yield make
    for bench in benches:
        bench.executor.done.set()
        bench.close()


def test_rank_0_answers_every_plan_in_order(make_bench):
    bench = make_bench()
    bench.send(*range(50))
    until(lambda: len(bench.read(StepResult)) == 50)
    assert [result.step for result in bench.read(StepResult)] == list(range(50))


def test_other_ranks_send_no_results(make_bench):
    bench = make_bench(rank=1)
    bench.send(0, 1, 2)
    until(lambda: len(bench.executor.plans) == 3 and len(bench.read(Heartbeat)) > 0)
    assert bench.read(StepResult) == []


def test_at_most_two_steps_are_pending_and_the_second_is_launched_before_the_first_is_done(make_bench):
    bench = make_bench()
    bench.executor.done.clear()
    bench.send(0, 1, 2, 3)
    until(lambda: len(bench.executor.plans) == 2)
    time.sleep(0.05)
    assert len(bench.executor.plans) == 2 and bench.read(StepResult) == []
    bench.executor.done.set()
    until(lambda: len(bench.read(StepResult)) == 4)
    assert bench.executor.most_pending == 2


def test_idle_work_is_done_once_after_steps_and_not_while_one_runs(make_bench):
    bench = make_bench()
    until(lambda: len(bench.read(Heartbeat)) >= 3)
    assert not bench.idle_work, "no step has run"
    bench.executor.done.clear()
    bench.send(0)
    until(lambda: len(bench.executor.plans) == 1)
    seen = len(bench.read(Heartbeat))
    until(lambda: len(bench.read(Heartbeat)) >= seen + 2)
    assert not bench.idle_work
    bench.executor.done.set()
    until(lambda: bench.idle_work)
    bench.send(1)
    seen = len(bench.read(Heartbeat))
    until(lambda: len(bench.read(Heartbeat)) >= seen + 3)
    assert len(bench.idle_work) == 1 and len(bench.read(StepResult)) == 2


def test_memory_with_holes_is_given_back():
    """A thousand blocks are allocated; every tenth stays."""
    process = psutil.Process()
    blocks = [bytearray(b"x") * 60_000 for _ in range(1_000)]
    kept = blocks[::10]
    blocks.clear()
    held = process.memory_info().rss
    trim_heap()
    assert process.memory_info().rss < held - 40e6 and len(kept) == 100


def test_heartbeats_come_while_idle_and_while_a_step_hangs(make_bench):
    bench = make_bench(rank=1)
    until(lambda: len(bench.read(Heartbeat)) >= 2)
    bench.executor.done.clear()
    bench.send(0)
    until(lambda: len(bench.executor.plans) == 1)
    count = len(bench.read(Heartbeat))
    until(lambda: len(bench.read(Heartbeat)) >= count + 2)
    assert bench.read(Heartbeat)[-1] == Heartbeat(rank=1, epoch=1, num_steps=0)


def test_a_stop_ends_the_loop(make_bench):
    bench = make_bench()
    bench.send(0)
    bench.link.send(encode(Stop()))
    until(lambda: bench.end is not None)
    assert bench.end == "stopped"


@pytest.mark.parametrize("busy", [False, True])
def test_the_coordinators_end_is_the_loops_end(make_bench, busy):
    bench = make_bench()
    until(lambda: len(bench.read(Heartbeat)) > 0)
    if busy:
        bench.executor.done.clear()
        bench.send(0)
        until(lambda: len(bench.executor.plans) == 1)
    bench.link.close()
    until(lambda: bench.end is not None)
    assert bench.end == "coordinator lost"


def test_an_exception_travels_up_and_ends_the_loop(make_bench):
    bench = make_bench()

    def fail(plan):
        raise RuntimeError("out of memory")

    bench.executor.submit = fail
    bench.send(0)
    until(lambda: len(bench.read(RankFailure)) == 1)
    failure = bench.read(RankFailure)[0]
    assert (failure.rank, failure.epoch) == (0, 1)
    assert "in fail" in failure.message and "out of memory" in failure.message
    until(lambda: bench.end is not None)
    assert isinstance(bench.end, RuntimeError)


def test_an_idle_rank_does_not_spin(make_bench):
    make_bench()
    started = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - started < 0.1


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack is Linux's")
def test_waiting_for_a_gpu_is_not_stretched_by_timer_slack(make_bench):
    """A sleep of 20 us would take 90: the loop's thread asks for its sleeps to end in time."""
    slack_ns = []
    bench = make_bench()
    submit = bench.executor.submit
    bench.executor.submit = lambda plan: (slack_ns.append(_timer_slack_ns()), submit(plan))
    bench.send(0)
    until(lambda: slack_ns)
    assert slack_ns == [1000] and _timer_slack_ns() > 1000  # of that thread alone


def _timer_slack_ns():
    return ctypes.CDLL(None).prctl(30, 0, 0, 0, 0)  # PR_GET_TIMERSLACK
