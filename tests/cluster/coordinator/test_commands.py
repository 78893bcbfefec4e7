"""Commands through the coordinator to scripted ranks in threads."""

import threading
import time

import pytest

from aerie.cluster.transport.admin import AbortRequests, AdminOutcome, Inspect, Pause, Resume, Sleep, WakeUp
from aerie.workers.runner.commands import CommandHandlers, InconsistentRankError
from aerie.workers.scheduling.commands.command import (
    Captured,
    CaptureGraph,
    Folder,
    LoadedWeights,
    LoadWeights,
    NamedTensor,
    ReleasedPages,
    ReleasePages,
    RestorePages,
    Tensors,
    first_error,
)
from aerie.workers.scheduling.plan import GraphCount
from aerie.workers.scheduling.request import Owner
from tests.support.cluster import until
from tests.support.scripted import scripted_output


class Noting:
    """Handlers of a scripted rank, which note the number of the rank's steps. fail: raised, if any."""

    def __init__(self, executor, rank):
        self.seen = []
        self.fail = None
        self._executor = executor
        self._handlers = CommandHandlers(rank)
        self._handlers.add(CaptureGraph, self._note)
        executor.carry_out = lambda command: (self._handlers.carry_out(command),)

    def _note(self, work):
        assert self._executor.num_pending == 0
        if self.fail is not None:
            raise self.fail
        self.seen.append(self._executor.num_steps)
        return Captured(GraphCount(num_captured=len(self.seen)))


@pytest.fixture
def served(make_bed):
    bed = make_bed(delay_s=0.002)
    ranks = bed.new_ranks()
    notes = [Noting(executor, rank) for rank, executor in enumerate(ranks.executors)]
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 1)
    return bed, notes


def test_every_rank_answers_at_the_same_place_among_the_plans_and_no_token_is_lost(served):
    bed, notes = served
    wanted = {f"q{i}": scripted_output(5, bed.generate(f"q{i}", seed=i, max_tokens=250)) for i in range(3)}
    until(lambda: bed.coordinator.stats().num_running == 3)
    for number in range(12):
        answers = bed.coordinator.carry_out(CaptureGraph()).result(10)
        assert [answer.rank for answer in answers] == [0, 1]
        assert [answer.result for answer in answers] == [Captured(GraphCount(number + 1))] * 2
        time.sleep(0.003 * (number % 3))
    for name, tokens in wanted.items():
        bed.ingress.read_end(name)
        assert bed.ingress.tokens(name) == tokens
    assert notes[0].seen == notes[1].seen and len(set(notes[0].seen)) > 4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_command_that_fails_on_one_rank_fails_alone(served, rank):
    bed, notes = served
    sampling = bed.generate("q", max_tokens=60)
    notes[rank].fail = ValueError("no such file")
    answers = bed.coordinator.carry_out(CaptureGraph()).result(10)
    assert [answer.error for answer in answers] == ["no such file" if each == rank else "" for each in range(2)]
    assert first_error(answers) == f"rank {rank}: no such file"
    notes[rank].fail = None
    assert first_error(bed.coordinator.carry_out(CaptureGraph()).result(10)) == ""
    bed.ingress.read_end("q")
    assert bed.ingress.tokens("q") == scripted_output(5, sampling) and not bed.lost


def test_a_rank_that_is_inconsistent_afterwards_ends_the_group_and_requests_run_on_the_next(served):
    bed, notes = served
    sampling = bed.generate("q", max_tokens=100)
    until(lambda: bed.coordinator.stats().num_running == 1)
    notes[1].fail = InconsistentRankError("half of the weights")
    futures = [bed.coordinator.carry_out(CaptureGraph()) for _ in range(2)]
    for future in futures:
        (answer,) = future.result(10)
        assert answer.rank == -1 and answer.error == "the ranks were lost"
    until(lambda: bed.lost)
    assert "rank 1 failed" in bed.lost[0] and "half of the weights" in bed.lost[0]
    (answer,) = bed.coordinator.carry_out(CaptureGraph()).result(10)
    assert "recovering" in answer.error
    ranks = bed.new_ranks(2)
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 2)
    bed.ingress.read_end("q")
    assert bed.ingress.tokens("q") == scripted_output(5, sampling)


def test_a_stopped_engine_answers_commands_that_wait(served):
    bed, notes = served
    entered, leave = threading.Event(), threading.Event()

    def wait(work):
        entered.set()
        leave.wait(10)
        return Captured(GraphCount())

    notes[0]._handlers.add(CaptureGraph, wait)
    futures = [bed.coordinator.carry_out(CaptureGraph()) for _ in range(2)]
    assert entered.wait(10)
    bed.coordinator.stop()
    leave.set()
    assert [first_error(future.result(10)) for future in futures] == ["the engine was stopped"] * 2


def test_requests_end_if_the_weights_that_they_began_with_cannot_be_restored(served):
    bed, notes = served
    for note in notes:
        note._handlers.add(LoadWeights, lambda work: LoadedWeights(dict.fromkeys(work.sources, ())))
    sent = LoadWeights(Tensors((NamedTensor("norm", "float32", (1,), bytes(4)),)))
    assert first_error(bed.coordinator.carry_out(sent).result(10)) == ""
    bed.generate("q", max_tokens=100)
    until(lambda: bed.coordinator.stats().num_running == 1)
    ranks = bed.new_ranks(2)
    again = [Noting(executor, rank) for rank, executor in enumerate(ranks.executors)]
    for note in again:
        note._handlers.add(LoadWeights, lambda work: LoadedWeights(dict.fromkeys(work.sources, ())))
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 2)
    end = bed.ingress.read_end("q")
    assert end.finish == "error" and "came in messages" in end.error
    assert first_error(bed.coordinator.carry_out(LoadWeights(Folder("/b"))).result(10)) == ""
    sampling = bed.generate("r", max_tokens=10)
    bed.ingress.read_end("r")
    assert bed.ingress.tokens("r") == scripted_output(5, sampling)


def test_a_kept_pause_stops_steps_and_an_update_comes_meanwhile(served):
    bed, notes = served
    for note in notes:
        note._handlers.add(LoadWeights, lambda work: LoadedWeights({"target": ("x",)}))
    sampling = bed.generate("q", max_tokens=60)
    until(lambda: bed.coordinator.stats().num_running == 1)
    assert bed.coordinator.administer(Pause("keep")) == AdminOutcome("e1", True, num_ranks=2)
    until(lambda: not bed.scheduler.num_in_flight)
    steps = [note._executor.num_steps for note in notes]
    later = bed.generate("r", max_tokens=5)
    outcome = bed.coordinator.administer(LoadWeights(Folder("/b")))
    assert outcome == AdminOutcome("e1", True, 1, {"target": ("x",)}, "1", 2)
    assert [note._executor.num_steps for note in notes] == steps and bed.coordinator.stats().num_waiting == 1
    assert bed.coordinator.administer(Resume()) == AdminOutcome("e1", False, 1, {}, "1", 2)
    for name, wanted in (("q", sampling), ("r", later)):
        bed.ingress.read_end(name)
        assert bed.ingress.tokens(name) == scripted_output(5, wanted)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_pause_ends_requests_and_refuses_new_ones_until_it_ends(served, mode):
    bed, _ = served
    sampling = bed.generate("q", max_tokens=60)
    until(lambda: bed.coordinator.stats().num_running == 1)
    assert bed.coordinator.administer(Pause(mode)) == AdminOutcome("e1", True, num_ranks=2)
    end = bed.ingress.read_end("q")
    assert end.finish == {"wait": "length", "abort": "abort"}[mode]
    assert mode == "abort" or bed.ingress.tokens("q") == scripted_output(5, sampling)
    bed.generate("r")
    assert "is paused" in bed.ingress.read_refusal("r").message
    assert not bed.coordinator.administer(Resume()).is_paused
    sampling = bed.generate("s")
    bed.ingress.read_end("s")
    assert bed.ingress.tokens("s") == scripted_output(5, sampling)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_sleeping_engine_has_no_pages_and_refuses_requests_until_it_wakes(served, mode):
    bed, notes = served
    state = {"held": [True, True]}
    for rank, note in enumerate(notes):
        pages(note, state, rank)
    sampling = bed.generate("q", max_tokens=60)
    until(lambda: bed.coordinator.stats().num_running == 1)
    outcome = bed.coordinator.administer(Sleep(mode))
    assert (outcome.error, outcome.is_sleeping, outcome.is_paused, outcome.num_bytes) == ("", True, True, 14)
    assert state["held"] == [False, False]
    assert bed.ingress.read_end("q").finish == {"wait": "length", "abort": "abort"}[mode]
    assert "POST /wake_up" in refusal(bed, "s")
    assert "sleeps; POST /wake_up first" in bed.coordinator.administer(Resume()).error
    ranks = bed.new_ranks(2)  # new ranks of an engine that sleeps sleep, too
    again = [Noting(executor, rank) for rank, executor in enumerate(ranks.executors)]
    state["held"] = [True, True]
    for rank, note in enumerate(again):
        pages(note, state, rank)
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 2)
    until(lambda: state["held"] == [False, False])
    state["fails"] = True
    outcome = bed.coordinator.administer(WakeUp())
    assert "is not free" in outcome.error and outcome.is_sleeping and "POST /wake_up" in refusal(bed, "t")
    state["fails"] = False
    assert bed.coordinator.administer(WakeUp()) == AdminOutcome("e1", num_ranks=2)
    sampling = bed.generate("u", max_tokens=20)
    bed.ingress.read_end("u")
    assert bed.ingress.tokens("u") == scripted_output(5, sampling)


def pages(note, state, rank):
    """Handlers of a rank with seven bytes of pages."""

    def release(work):
        state["held"][rank] = False
        return ReleasedPages(7)

    def restore(work):
        if state.get("fails"):
            raise ValueError("the memory is not free")
        state["held"][rank] = True
        return ReleasedPages()

    note._handlers.add(ReleasePages, release)
    note._handlers.add(RestorePages, restore)


def refusal(bed, name):
    bed.generate(name)
    return bed.ingress.read_refusal(name).message


def test_an_engine_that_cannot_release_its_pages_serves_on(served):
    bed, _ = served
    assert "do not carry out ReleasePages" in bed.coordinator.administer(Sleep()).error
    sampling = bed.generate("q", max_tokens=20)
    bed.ingress.read_end("q")
    assert bed.ingress.tokens("q") == scripted_output(5, sampling)
    bed.coordinator.administer(Pause("keep"))
    assert bed.coordinator.administer(Sleep()).error and bed.coordinator.administer(Inspect()).is_paused


def test_requests_are_aborted_by_the_ids_of_their_clients(served):
    bed, _ = served
    for name, client in (("a", "one"), ("b", "two"), ("c", "one")):
        bed.generate(name, max_tokens=250, owner=Owner(request_id=client))
    until(lambda: bed.coordinator.stats().num_running == 3)
    assert bed.coordinator.administer(AbortRequests(("one", "three"))).num_aborted == 2
    assert [bed.ingress.read_end(name).finish for name in "acb"] == ["abort", "abort", "length"]


def test_an_administrator_gets_the_error_of_a_rank(served):
    bed, _ = served
    assert "do not carry out LoadWeights" in bed.coordinator.administer(LoadWeights(Folder("/b"))).error
    assert bed.coordinator.administer(Inspect()) == AdminOutcome("e1", num_ranks=2)
