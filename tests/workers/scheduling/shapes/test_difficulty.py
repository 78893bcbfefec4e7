"""What the target's min-entropy says of acceptance."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.workers.scheduling.acceptance.difficulty import MAX_LOG_ODDS, MAX_SLOPE, SLOPE, Difficulty
from tests.support.simulation.streams import Stream, in_orders
from tests.support.simulation.texts import DRAFTS, costs_of, recorded
from tests.support.slow import slow

NAN = float("nan")


PLAIN = -1


def count(difficulty: Difficulty, numbers: np.ndarray, nats: list[float], family: int = 0, steps: int = 1) -> None:
    slots = np.arange(len(nats))
    difficulty.count([(family, slots, numbers[slots], np.array(nats))] * steps, numbers)


def test_a_request_that_the_target_is_surer_of_accepts_more_also_after_plain_rounds() -> None:
    difficulty, numbers = Difficulty(4, 1), np.arange(4)
    assert difficulty.log_odds(np.arange(4)).tolist() == [[0.0] * 4]
    count(difficulty, numbers, [0.5, 0.5, 0.5, 0.5], steps=50)
    assert difficulty.log_odds(np.arange(4))[0] == pytest.approx([0.0] * 4)
    count(difficulty, numbers, [0.1, 0.5, 2.0, NAN], family=PLAIN, steps=50)
    easy, same, hard, unknown = difficulty.log_odds(np.arange(4))[0].tolist()
    assert easy > 0.5 and hard < -1.5 and abs(same) < 0.1 and abs(unknown) < 0.1


def test_a_fresh_request_begins_as_the_last_ones_were() -> None:
    difficulty, numbers = Difficulty(2, 1), np.arange(2)
    count(difficulty, numbers, [1.0], steps=200)
    count(difficulty, numbers, [0.2], family=PLAIN, steps=200)
    assert difficulty.log_odds(np.array([1])) > 1.0


def test_rounds_of_a_former_request_are_not_those_of_the_next() -> None:
    difficulty, numbers = Difficulty(1, 1), np.array([7])
    count(difficulty, numbers, [0.5], steps=50)
    difficulty.ended(np.array([0]), 0, np.zeros(1), np.zeros(1))
    before = difficulty.log_odds(np.array([0]))
    difficulty.count([(PLAIN, np.array([0]), np.array([6]), np.array([3.0]))], numbers)  # 6 was there before
    assert abs(difficulty.log_odds(np.array([0])) - before) < 0.3


@pytest.mark.parametrize(("actual", "sign"), [(4.0, 1), (0.0, -1)])
def test_how_much_a_nat_matters_is_learnt_from_ended_requests(actual: float, sign: int) -> None:
    difficulty, random, numbers = Difficulty(1, 1), np.random.default_rng(0), np.zeros(1, np.int64)
    slot = np.array([0])
    count(difficulty, numbers, [1.0], steps=2000)
    for _ in range(200):
        nats = random.uniform(0.2, 1.8)
        count(difficulty, numbers, [nats], steps=60)
        odds = np.exp(-actual * difficulty._difference(slot)[0])
        expected = np.exp(difficulty.log_odds(slot)[0])
        excess = 40 * (odds / (1 + odds) - expected / (1 + expected))
        difficulty.ended(slot, 0, excess, np.full(1, 40 * 0.25))
    assert sign * (difficulty.slope - SLOPE) > 0.8


@given(
    st.lists(
        st.tuples(st.integers(PLAIN, 3), st.lists(st.floats(allow_nan=True), min_size=3, max_size=3)), max_size=20
    ),
    st.lists(st.tuples(st.floats(-50, 50), st.floats(0, 50)), min_size=3, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_any_report_leaves_finite_odds(steps: list[tuple[int, list[float]]], ended: list[tuple[float, float]]) -> None:
    difficulty, numbers = Difficulty(3, 4), np.arange(3)
    for family, nats in steps:
        count(difficulty, numbers, nats, family)
        difficulty.ended(np.arange(3), max(family, 0), *np.array(ended).T)
        count(difficulty, numbers, nats, family)
    odds = difficulty.log_odds(np.arange(3))
    assert np.isfinite(odds).all() and (np.abs(odds) <= MAX_LOG_ODDS).all() and 0.0 <= difficulty.slope <= MAX_SLOPE


def test_each_family_is_compared_with_the_rounds_that_it_was_learnt_from() -> None:
    """A tree that ran on easy text alone is not expected to do as well on a hard one."""
    difficulty, numbers = Difficulty(1, 2), np.zeros(1, np.int64)
    count(difficulty, numbers, [0.2], family=0, steps=500)
    count(difficulty, numbers, [1.2], family=1, steps=500)
    of_easy, of_hard = difficulty.log_odds(np.array([0]))[:, 0].tolist()
    assert of_easy < -1.5 and abs(of_hard) < 0.3


@pytest.mark.parametrize(
    ("draft", "mean", "low"), [("eagle3", 0.965, 0.92), *slow(("dspark", 0.98, 0.93), ("dflash2", 0.955, 0.88))]
)
def test_plain_rounds_tell_that_a_text_has_become_easy(draft: str, mean: float, low: float) -> None:
    """Steps 200 to 600 of each kind of text, one after the other, one request at a time. When only drafts told what
    they were worth, means were 0.952 (DSpark) and 0.941 (EAGLE-3), the lowest 0.81 and 0.73."""
    shapes, found = DRAFTS[draft].shapes, []
    answers = {kind: [each for each in some if each.num_tokens > 1] for kind, some in recorded(draft).items()}
    for order in in_orders(list(answers), 4):
        stream = Stream(shapes, costs_of(shapes))
        for kind in order:
            stream.run(answers[kind], 200)
            found.append(stream.run(answers[kind], 400).share)
    assert np.mean(found) > mean and min(found) > low, found
