"""Commands between plans: the order in which the scheduler sends both, and what ends a command."""

import random
from collections.abc import Sequence

import pytest

from aerie.workers.scheduling.commands.command import Captured, CaptureGraph, Command, CommandAnswer, first_error
from aerie.workers.scheduling.plan import GraphCount
from tests.support.simulation.scheduler import Simulation


def answer(command: Command, error: str = "") -> CommandAnswer:
    return CommandAnswer(command.epoch, command.step, 0, None if error else Captured(GraphCount()), error)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_command_waits_for_all_results_and_no_plan_is_made_before_its_answer(max_in_flight: int) -> None:
    """At random moments, beside requests whose tokens stay the same."""
    draw = random.Random(3)
    sim = Simulation(max_in_flight=max_in_flight)
    requests = [sim.submit([5, 6, 7, i], max_tokens=20 + 3 * i) for i in range(5)]
    scheduler, answered, commands = sim.scheduler, list[Sequence[CommandAnswer]](), list[Command]()
    for number in range(200):
        if draw.random() < 0.3:
            scheduler.commands.add(CaptureGraph(), answered.append)
            while scheduler.num_in_flight:
                assert sim.schedule() is None, "a plan came before the command"
                assert scheduler.next_command() is None, "a command came before the result of a step"
                sim.read()
            assert sim.schedule() is None
            command = scheduler.next_command()
            assert command is not None
            commands.append(command)
            assert scheduler.next_command() is None and sim.schedule() is None
            scheduler.command_answered([answer(command, "no room" if number % 2 else "")])
            assert len(answered) == len(commands)
        sim.step()
    sim.run()
    for request in requests:
        sim.check_output(request)
    assert [first_error(answers) for answers in answered].count("no room") > 5 < len(commands)
    numbers = [message.step for message in [*sim.plans, *commands]]
    assert sorted(numbers) == list(range(len(numbers))), "plans and commands are numbered together"


def test_commands_come_in_the_order_in_which_they_were_added() -> None:
    sim, answered = Simulation(), list[int]()
    for number in range(3):
        sim.scheduler.commands.add(CaptureGraph(), lambda answers, number=number: answered.append(number))
    while (command := sim.scheduler.next_command()) is not None:
        sim.scheduler.command_answered([answer(command)])
    assert answered == [0, 1, 2] and sim.scheduler.commands.is_empty


def test_lost_ranks_end_all_commands_with_an_error_and_their_late_answers_are_dropped() -> None:
    sim, answered = Simulation(), list[str]()
    for _ in range(2):
        sim.scheduler.commands.add(CaptureGraph(), lambda answers: answered.append(first_error(answers)))
    command = sim.scheduler.next_command()
    assert command is not None
    request = sim.submit([5, 6, 7], max_tokens=4)
    sim.new_worker_group(1)
    assert answered == ["the ranks were lost"] * 2
    sim.scheduler.command_answered([answer(command)])
    sim.run()
    sim.check_output(request)


def test_an_error_names_its_rank_if_there_are_several() -> None:
    done = Captured(GraphCount())
    answers = [CommandAnswer(0, 4, 0, done), CommandAnswer(0, 4, 1, error="no room")]
    assert first_error(answers) == "rank 1: no room" and first_error(answers[:1]) == ""
    assert first_error(answers[1:]) == "no room"
