"""When captures come while an engine serves, by a clock that the test turns."""

import pytest

from aerie.workers.scheduling.commands.command import Captured, CaptureGraph, CommandAnswer
from aerie.workers.scheduling.commands.command_queue import IDLE_S, CapturePacing
from aerie.workers.scheduling.plan import GraphCount
from tests.support.simulation.scheduler import Simulation


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def captured(pacing: CapturePacing, *graphs: int) -> None:
    pacing.answered([CommandAnswer(0, 0, rank, Captured(GraphCount(*graphs))) for rank in range(2)])


def test_an_idle_engine_captures_one_after_the_other() -> None:
    clock = Clock()
    pacing = CapturePacing(5.0, clock)
    assert not pacing.is_due(is_idle=True), "nothing is waiting"
    pacing.graphs = GraphCount(10, 2)
    assert pacing.is_due(is_idle=True)
    pacing.is_pending = True
    assert not pacing.is_due(is_idle=True), "one at a time"
    captured(pacing, 11, 1)
    assert not pacing.is_pending and pacing.graphs == GraphCount(11, 1)
    clock.now += IDLE_S
    assert pacing.is_due(is_idle=True)
    captured(pacing, 12, 0)
    assert not pacing.is_due(is_idle=True)


def test_a_failed_capture_is_the_last_one_of_these_ranks() -> None:
    clock = Clock()
    pacing = CapturePacing(5.0, clock)
    pacing.graphs = GraphCount(10, 2)
    pacing.is_pending = True
    pacing.answered([CommandAnswer(0, 0, 0, Captured(GraphCount(11, 1))), CommandAnswer(0, 0, 1, error="no memory")])
    clock.now += 100 * IDLE_S
    assert not pacing.is_pending and not pacing.is_due(is_idle=True)
    pacing.reset()
    pacing.graphs = GraphCount(10, 2)
    assert pacing.is_due(is_idle=True), "other ranks may"


def test_who_comes_back_soon_meets_no_capture() -> None:
    clock = Clock()
    pacing = CapturePacing(60.0, clock)
    pacing.graphs = GraphCount(10, 2)
    for _ in range(20):  # requests of 50 ms, 0.4 s apart
        assert not pacing.is_due(is_idle=False)
        clock.now += 0.05
        assert not pacing.is_due(is_idle=False)
        for _ in range(4):
            clock.now += 0.1
            assert not pacing.is_due(is_idle=True)
    clock.now += IDLE_S
    assert pacing.is_due(is_idle=True)


def test_under_load_a_capture_comes_once_steps_have_lost_what_it_takes() -> None:
    """And no sooner; without a load it does not wait for that."""
    clock = Clock()
    pacing = CapturePacing(1.0, clock)
    clock.now += 2.0
    pacing.row_ms = 0.02
    for missed_rows, is_due in ((0, False), (1499, False), (1500, True), (9000, True)):
        pacing.graphs = GraphCount(10, 2, missed_rows, capture_ms=30.0)
        assert pacing.is_due(is_idle=False) == is_due
    pacing.row_ms, pacing.graphs = None, GraphCount(10, 2, 1, 30.0)
    assert pacing.is_due(is_idle=False), "what a row takes is not known"
    pacing.graphs = GraphCount(10, 2, 0, 30.0)
    assert not pacing.is_due(is_idle=False)
    clock.now += IDLE_S
    assert pacing.is_due(is_idle=True)


def test_without_an_interval_captures_come_before_every_step() -> None:
    pacing = CapturePacing(0.0, Clock())
    pacing.graphs, pacing.row_ms = GraphCount(10, 2), 0.02
    assert pacing.is_due(is_idle=False)


def test_under_load_there_is_an_interval_between_captures() -> None:
    """They do not wait for an idle moment that never comes."""
    clock = Clock()
    pacing = CapturePacing(5.0, clock)
    pacing.graphs = GraphCount(10, 100, missed_rows=1)
    times = []
    for _ in range(4000):
        clock.now += 0.01
        if pacing.is_due(is_idle=False):
            times.append(clock.now)
            pacing.is_pending = True
            clock.now += 0.1
            captured(pacing, 10, 100, 1)
    gaps = [later - sooner for sooner, later in zip(times, times[1:], strict=False)]
    assert len(times) == 7 and all(5.1 <= gap < 5.12 for gap in gaps)


def test_nothing_is_planned_between_a_capture_and_its_answers() -> None:
    sim = Simulation()
    scheduler = sim.scheduler
    scheduler.captures.graphs = GraphCount(10, 1)
    sim.clock.now += IDLE_S
    assert scheduler.schedule() is None
    command = scheduler.next_command()
    assert command is not None and command.work == CaptureGraph()
    request = sim.submit([5, 6, 7], max_tokens=4)
    assert scheduler.schedule() is None and scheduler.next_command() is None
    scheduler.command_answered([CommandAnswer(command.epoch, command.step, 0, Captured(GraphCount(11, 0)))])
    assert scheduler.captures.graphs == GraphCount(11, 0)
    sim.executor.graphs = GraphCount(11, 0)
    sim.run()
    sim.check_output(request)
    assert [plan.step for plan in sim.plans] == list(range(command.step + 1, command.step + 1 + len(sim.plans)))


@pytest.mark.parametrize("max_running", [1, 4])
def test_no_graph_is_captured_while_a_request_runs_or_waits(max_running: int) -> None:
    """However long that takes, as long as padding has cost nothing. One of two requests waits if one slot is all."""
    sim = Simulation(max_running=max_running)
    sim.executor.graphs = sim.scheduler.captures.graphs = GraphCount(10, 1)
    for _ in range(2):
        sim.submit([1, 2, 3], max_tokens=6)
    while sim.scheduler.num_running or sim.scheduler.num_waiting:
        sim.clock.now += 10 * IDLE_S
        assert sim.schedule() is not None and sim.scheduler.next_command() is None
        sim.read()
    assert sim.schedule() is None and sim.scheduler.next_command() is None
    sim.clock.now += 2 * IDLE_S
    assert sim.schedule() is None and sim.scheduler.next_command() is not None
