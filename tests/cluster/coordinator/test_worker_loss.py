"""Worker groups that come, fail, hang and are replaced, over real ZeroMQ sockets with scripted ranks in threads."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from aerie.cluster.coordinator import worker_links
from aerie.cluster.http.answer import PromptScores
from aerie.cluster.transport import sockets
from aerie.cluster.transport.messages import Probe
from aerie.workers.scheduling.plan import StepPlan
from tests.support.cluster import Ranks, until
from tests.support.scripted import scripted_output


def test_requests_wait_until_a_worker_group_is_attached(make_bed):
    bed = make_bed()
    bed.generate("q", max_tokens=3)
    until(lambda: bed.coordinator.stats().num_waiting == 1)
    assert bed.coordinator.stats().status == "starting"
    bed.attach()
    bed.ingress.read_end("q")
    assert bed.coordinator.stats().status == "ready"


def test_a_rank_that_dies_is_noticed_and_its_requests_are_resumed_on_the_next_worker_group(make_bed):
    bed = make_bed(delay_s=0.005)
    ranks = bed.attach(epoch=1)
    params = bed.generate("q", max_tokens=100, seed=3)
    bed.generate("later", max_tokens=5)
    while len(bed.ingress.tokens("q")) < 20:
        bed.ingress.read()
    ranks.kill(1)
    until(lambda: bool(bed.lost))
    assert bed.lost[0].startswith("rank 1 is gone")
    assert bed.coordinator.stats().status == "recovering"
    bed.attach(epoch=2)
    assert bed.ingress.read_end("q").finish == "length"
    assert bed.ingress.tokens("q") == scripted_output(5, params), "tokens were lost or repeated"
    assert bed.ingress.read_end("later").finish == "length"
    assert bed.coordinator.stats().num_worker_restarts == 1
    assert not bed.deaths


def test_a_request_is_resumed_so_often_and_no_more(make_bed):
    bed = make_bed(delay_s=0.01, max_resumes=1)
    bed.attach(epoch=1)
    bed.generate("q", max_tokens=300)
    for epoch in (2, 3):
        bed.ingress.read()
        bed.coordinator.detach("for the test")
        bed.attach(epoch)
    end = bed.ingress.read_end("q")
    assert (end.finish, end.error) == ("error", "for the test (after 1 resumptions)")
    assert bed.coordinator.stats().scheduler.num_resumed == 1


def test_without_resumption_running_requests_fail_at_once_and_waiting_ones_are_kept(make_bed):
    bed = make_bed(delay_s=0.01, max_running=1, on_worker_loss="error")
    bed.attach(epoch=1)
    bed.generate("running", max_tokens=300)
    bed.generate("waiting", max_tokens=3)
    bed.ingress.read()
    bed.coordinator.detach("the cable was cut")
    assert bed.ingress.read_end("running").error == "the cable was cut"
    bed.attach(epoch=2)
    assert bed.ingress.read_end("waiting").finish == "length"


def test_what_an_executor_raises_arrives_with_its_traceback(make_bed):
    bed = make_bed()
    ranks = bed.new_ranks()

    def fail(plan):
        raise RuntimeError("out of memory")

    ranks.executors[1].submit = fail
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 1)
    bed.generate("q")
    until(lambda: bool(bed.lost))
    assert bed.lost[0].startswith("rank 1 failed: Traceback") and "RuntimeError: out of memory" in bed.lost[0]
    ranks.join()
    assert isinstance(ranks.ends[1], RuntimeError)


def test_a_hanging_step_shows_in_the_health_and_is_given_up(make_bed):
    bed = make_bed(step_timeout_s=0.3)
    ranks = bed.new_ranks()
    released = threading.Event()
    ranks.executors[0].ready = released.is_set
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 1)
    assert bed.oldest_plan_age_s() == 0.0
    bed.generate("q")
    until(lambda: bed.oldest_plan_age_s() > 0.1)
    assert len(bed.coordinator.stats().heartbeat_age_s) == 2
    until(lambda: bed.coordinator.loop_age_s() < 0.1)
    until(lambda: bool(bed.lost))
    assert "no result of step 0" in bed.lost[0] and "step_timeout_s=0.3" in bed.lost[0]
    released.set()


RANK = """
import sys, time, zmq
from aerie.cluster.replica.worker_loop import run_worker_loop
from aerie.cluster.transport.channel import RankChannel
from aerie.cluster.transport.sockets import Transport
from tests.support.scripted import ScriptedExecutor
from aerie.workers.config import PLAIN, RoundShape, RoundShapes

folder, busy_s = sys.argv[1], float(sys.argv[2])
tree = RoundShape(name="tree", width=6, max_new_tokens=4, draft_tokens=2)
executor = ScriptedExecutor(RoundShapes((PLAIN, tree), default=1), 8, 200)
submit = executor.submit

def spin(plan):
    until = time.monotonic() + busy_s
    while time.monotonic() < until:
        sum(range(100_000))
    submit(plan)

executor.submit = spin
channel = RankChannel(zmq.Context(), Transport(folder=folder), 0, 1, "own-process")
print(channel.endpoint, flush=True)
run_worker_loop(executor, channel)
"""


@pytest.fixture
def rank_process(tmp_path):
    """A rank in a process of its own; each step keeps its Python busy for a second."""
    command = [sys.executable, "-c", RANK, str(tmp_path), "1.0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("at_work", [False, True])
def test_a_stopped_rank_is_noticed_idle_or_at_work_and_a_busy_one_is_not(make_bed, rank_process, monkeypatch, at_work):
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(sockets, "HEARTBEAT_TIMEOUT_MS", 500)
    bed = make_bed()
    endpoint = rank_process.stdout.readline().strip()
    bed.coordinator.attach([endpoint], 1, locations=["pid 7 on node 10.0.0.1"])
    bed.generate("q", max_tokens=2)  # two steps that answer nothing for a second
    assert bed.ingress.read_end("q").finish == "length"
    assert not bed.lost
    if at_work:
        bed.generate("r", max_tokens=100)
        until(lambda: bed.oldest_plan_age_s() > 0)
    os.kill(rank_process.pid, signal.SIGSTOP)
    until(lambda: bool(bed.lost))  # 0.6 s if the machine has time
    assert bed.lost[0].startswith("rank 0 (pid 7 on node 10.0.0.1) is gone")
    stats = bed.coordinator.stats()
    assert stats.status == "recovering" and stats.detail == bed.lost[0]


def test_a_rank_whose_loop_hangs_while_idle_is_given_up(make_bed, monkeypatch):
    monkeypatch.setattr(worker_links, "IDLE_HEARTBEAT_LIMIT_S", 1.5)
    bed = make_bed()
    ranks = bed.new_ranks()
    released = threading.Event()
    waited = ranks.channels[1].wait
    ranks.channels[1].wait = lambda timeout_ms: released.wait() and waited(timeout_ms)
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 1)
    until(lambda: bool(bed.lost))
    assert bed.lost[0].startswith("rank 1 hangs: idle, and no heartbeat for")
    released.set()


def test_logprobs_of_a_prompt_reach_the_ingress_whole_though_the_group_is_lost(make_bed):
    """Chunk by chunk, and from the beginning again on the next worker group; the prompt is longer than a step."""
    bed = make_bed(delay_s=0.02)
    ranks = bed.attach(epoch=1)
    bed.generate("q", prompt_len=200, max_tokens=2, prompt_logprobs=0)
    while not any(delta.prompt_logprobs for delta in bed.ingress.deltas.get("q", [])):
        assert bed.ingress.read()
    ranks.kill(1)
    until(lambda: bool(bed.lost))
    bed.attach(epoch=2)
    bed.ingress.read_end("q")
    scores, deltas = PromptScores(), bed.ingress.deltas["q"]
    parts = [part for delta in deltas for part in delta.prompt_logprobs]
    for part in parts:
        scores.push(part)
    assert [part.start for part in parts].count(1) == 2, "the test means nothing without a second beginning"
    assert [score.logprob for score in scores] == [-float(token) for token in range(1, 200)]
    first_token = next(i for i, delta in enumerate(deltas) if delta.tokens)
    assert not any(delta.prompt_logprobs for delta in deltas[first_token:])


def fails_with(ranks: Ranks, seed: int) -> None:
    """Any step in which a request with this seed begins ends its rank."""
    submit = ranks.executors[1].submit

    def fail(plan: StepPlan) -> None:
        if any(init.sampling.seed == seed for init in plan.inits):
            raise RuntimeError("cannot run that")
        submit(plan)

    ranks.executors[1].submit = fail  # type: ignore[method-assign]


def test_a_request_whose_steps_crash_is_resumed_once_and_takes_no_other_with_it(make_bed, caplog):
    """It comes back alone among those that ran with it, so that the second crash says which one it was."""
    bed = make_bed(delay_s=0.005, max_running=8)
    names = ["a", "b", "c"]
    wanted = {name: bed.generate(name, max_tokens=120, seed=number) for number, name in enumerate(names)}
    bed.generate("poison", max_tokens=120, seed=13)
    for epoch in (1, 2):
        ranks = bed.new_ranks(epoch)
        fails_with(ranks, 13)
        ranks.start()
        bed.coordinator.attach(ranks.endpoints, epoch)
        until(lambda: len(bed.lost) == epoch)  # noqa: B023
    end = bed.ingress.read_end("poison")
    assert end.finish == "error" and str(end.error).endswith("(its steps hung or crashed twice)")
    assert caplog.messages.count("request poison is not resumed again: its steps hung or crashed twice") == 1
    suspects = [line.split()[-1] for line in caplog.messages if line.startswith("the step that hung or crashed ran")]
    assert suspects[-1] == "poison", caplog.messages
    bed.attach(epoch=3)
    for name in names:
        assert bed.ingress.read_end(name).finish == "length"
        assert bed.ingress.tokens(name) == scripted_output(5, wanted[name])


@pytest.mark.parametrize("num_crashes", [0, 1])
def test_an_ingress_is_told_of_crashes_and_the_next_engine_counts_on(make_bed, num_crashes):
    bed = make_bed()
    ranks = bed.new_ranks()
    fails_with(ranks, 13)
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 1)
    bed.generate("poison", max_tokens=20, seed=13, num_crashes=num_crashes)
    if num_crashes:
        assert "twice" in str(bed.ingress.read_end("poison").error)
        return
    while not any(delta.num_crashes == 1 for delta in bed.ingress.deltas.get("poison", [])):
        assert bed.ingress.read()


def test_a_probe_is_refused_while_a_step_hangs(make_bed, monkeypatch):
    monkeypatch.setattr(worker_links, "HUNG_S", 0.2)
    bed = make_bed()
    ranks = bed.new_ranks()
    released = threading.Event()
    ready = ranks.executors[0].ready
    ranks.executors[0].ready = lambda: released.is_set() and ready()
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 1)
    bed.generate("q", max_tokens=3)
    until(lambda: bed.oldest_plan_age_s() > 0.3)
    bed.ingress.send(Probe("probe"))
    assert "has had no result for" in bed.ingress.read_refusal("probe").message
    released.set()
    assert bed.ingress.read_end("q").finish == "length"
    bed.ingress.send(Probe("again"))
    assert bed.ingress.read_end("again").finish == "stop"
