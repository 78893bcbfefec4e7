"""When a candidate counts as better, and when a published draft counts as worse."""

import numpy as np
import pytest

from aerie.cluster.learning.gate import gain_of
from aerie.cluster.learning.watch import AcceptanceWatch


def texts(acceptance: float, count: int, seed: int) -> list[tuple[int, int]]:
    """Rounds and accepted tokens of texts of 20 to 60 rounds."""
    draw = np.random.default_rng(seed)
    rounds = draw.integers(20, 60, count)
    return [(int(n), int(draw.binomial(4 * n, acceptance / 4))) for n in rounds]


def test_equal_drafts_pass_as_often_as_the_bound_says() -> None:
    """The lower bound is the 5 % quantile: 200 pairs pass 10 times on average, above 20 with a probability of 0.002."""
    passed = sum(gain_of(texts(1.0, 40, seed), texts(1.0, 40, 10_000 + seed)).low > 0 for seed in range(200))
    assert passed <= 20


def test_a_better_draft_passes_and_a_worse_one_is_known_as_such() -> None:
    better = gain_of(texts(1.0, 40, 1), texts(1.3, 40, 2))
    assert better.low > 0.005 and 0.1 < better.gain < 0.2 and better.candidate > better.served
    worse = gain_of(texts(1.0, 40, 1), texts(0.7, 40, 2))
    assert worse.high < 0 and worse.low < worse.gain < worse.high
    with pytest.raises(ValueError, match="no rounds"):
        gain_of([], [])
    with pytest.raises(ValueError, match="no rounds"):
        gain_of([(0, 0)], [(0, 0)])


def histogram(acceptance: float, rounds: int, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).binomial(4, acceptance / 4, rounds)
    return np.bincount(drawn, minlength=5).tolist()


@pytest.mark.parametrize(("after", "most_rounds"), [(0.0, 200), (0.5, 1000), (0.8, 4000)])
def test_a_draft_that_accepts_less_is_noticed(after: float, most_rounds: int) -> None:
    watch = AcceptanceWatch(histogram(1.2, 2000, 0))
    draw = np.random.default_rng(1)
    rounds = 0
    while not watch.has_fallen(10, int(draw.binomial(40, after / 4))):
        rounds += 10
        assert rounds < most_rounds


def test_a_draft_as_good_as_before_stays() -> None:
    """200,000 rounds; one false alarm is expected in about 10,000 excursions, each of hundreds of rounds."""
    watch = AcceptanceWatch(histogram(1.2, 5000, 0))
    draw = np.random.default_rng(2)
    assert not any(watch.has_fallen(10, int(accepted)) for accepted in draw.binomial(40, 0.3, 20_000))


def test_without_earlier_rounds_nothing_is_compared() -> None:
    assert not AcceptanceWatch([10, 20]).has_fallen(10_000, 0)
