"""A draft whose acceptance is lost after an update of weights."""

import random

import pytest

from aerie.workers.scheduling.commands.command_queue import FEW_ROUNDS, HALF_ROUNDS, NONE_ROUNDS, DraftCheck


class Rounds:
    """Counts rounds as a scheduler does."""

    def __init__(self) -> None:
        self.histogram = [0] * 5
        self.check = DraftCheck(lambda: self.histogram)

    def run(self, count: int, accepted: int = 0, every: int = 1) -> None:
        """Each `every`-th of the rounds accepts `accepted` draft tokens."""
        for number in range(count):
            self.histogram[accepted if number % every == 0 else 0] += 1
            self.check.observe()


def test_no_update_no_fault() -> None:
    rounds = Rounds()
    rounds.run(1000)
    assert not rounds.check.fault


@pytest.mark.parametrize(("accepted", "every", "needed"), [(0, 1, NONE_ROUNDS), (1, 20, FEW_ROUNDS)])
def test_a_dead_draft_is_named_after_few_rounds_and_until_the_next_update(
    accepted: int, every: int, needed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = Rounds()
    rounds.check.restart("step-1")
    rounds.run(needed - 1, accepted, every)
    assert not rounds.check.fault
    rounds.run(1)
    assert rounds.check.fault.startswith("since weights step-1") and rounds.check.fault in caplog.text
    rounds.run(500, 3)
    assert rounds.check.fault, "it is named until somebody has sent weights"
    rounds.check.restart("step-2")
    rounds.run(HALF_ROUNDS, 2)
    assert not rounds.check.fault


def test_a_draft_that_lost_half_of_its_acceptance_is_named() -> None:
    rounds = Rounds()
    rounds.run(HALF_ROUNDS, 2)
    rounds.check.restart("a")
    rounds.run(HALF_ROUNDS, 1, 1)
    assert not rounds.check.fault, "just half"
    rounds.check.restart("b")
    rounds.run(HALF_ROUNDS, 2, 5)
    assert "0.41 draft tokens each, 1.00 before" in rounds.check.fault


def test_a_poor_but_living_draft_is_not_named() -> None:
    """0.5 tokens a round; the chance of a false alarm in these 200 updates is 200 * exp(-8) = 0.07 for a free seed; for
    this one it is none."""
    draw = random.Random(1)
    rounds = Rounds()
    for number in range(200):
        rounds.check.restart(str(number))
        for _ in range(HALF_ROUNDS):
            rounds.histogram[draw.random() < 0.5] += 1
            rounds.check.observe()
        assert not rounds.check.fault
