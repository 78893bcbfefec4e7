"""Running estimates of acceptance against chances that are known."""

import time

import numpy as np
import pytest

from aerie.speculative.tree_shape import TreeShape
from aerie.workers.config import PLAIN, RoundShapes
from aerie.workers.scheduling.acceptance.survival import Survival

ONE, CHAIN, TREE = 1, 2, 3
SHAPES = RoundShapes(
    (PLAIN, TreeShape.of(1, 1, 2), TreeShape.of(3, 1, 4), TreeShape.of(5, 4, 16)), default=3, adaptive=True
)
DEPTH = {ONE: 1, CHAIN: 3, TREE: 5}


class Rounds:
    """Rounds of `count` requests whose drafts are accepted with these chances, by depth."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.survival = Survival(SHAPES, count + 3)
        self.slots = np.arange(count)[::-1] + 2
        self.numbers = self.slots * 10
        self.random = np.random.default_rng(seed)

    def run(self, shape: int, chances: list[float], num_steps: int, drafted: int | None = None) -> None:
        drafted = shape if drafted is None else drafted
        possible = min(DEPTH[shape], DEPTH[drafted])
        for _ in range(num_steps):
            held = self.random.random((len(self.slots), possible)) < chances[:possible]
            accepted = held.cumprod(1).sum(1).astype(np.int32)
            self.record(drafted, shape, accepted)

    def record(self, drafted: int, shape: int, accepted: np.ndarray) -> None:
        self.survival.record(self.slots, self.numbers, np.full(len(self.slots), drafted), shape, accepted)

    def tokens(self, hoped: bool = False) -> list[float]:
        """Expected of each shape, or hoped for, per request."""
        everyone = np.ones(len(self.slots), np.bool_)
        both = np.array(self.survival.expected_tokens(self.slots, self.numbers, everyone)) / len(self.slots)
        assert np.isfinite(both).all() and (both[1] >= both[0]).all() and (both[0] >= 1).all()
        return both[int(hoped)].tolist()


def tokens_of(chances: list[float], depth: int) -> float:
    return 1 + sum(float(np.prod(chances[:k])) for k in range(1, depth + 1))


@pytest.mark.parametrize("chances", [[0.9, 0.8, 0.7], [0.3, 0.3, 0.3], [1.0, 1.0, 0.0], [0.0, 0.5, 0.5]])
@pytest.mark.parametrize("count", [1, 8, 100])
def test_expected_tokens_become_what_rounds_emit(chances: list[float], count: int) -> None:
    """For the running chain and for the shorter one."""
    rounds = Rounds(count)
    rounds.run(CHAIN, chances, 2000 // count + 60)
    plain, one, chain, _ = rounds.tokens()
    # 2,000 rounds, and the prior's few: standard error of a chance at most 0.012
    assert plain == 1.0
    assert one == pytest.approx(tokens_of(chances, 1), abs=0.06)
    assert chain == pytest.approx(tokens_of(chances, 3), abs=0.12)


def test_a_path_accepted_to_its_end_says_nothing_of_what_is_deeper() -> None:
    """Short chains that always hold do not promise less of longer ones; what was drafted shorter than is verified
    neither."""
    for drafted, verified in ((ONE, ONE), (ONE, CHAIN), (CHAIN, ONE)):
        rounds = Rounds(4)
        rounds.run(CHAIN, [0.9, 0.9, 0.9], 200)
        before = rounds.tokens()[CHAIN]
        rounds.run(verified, [0.9], 50, drafted=drafted)
        assert rounds.tokens()[CHAIN] == pytest.approx(before, abs=0.15)


def test_estimates_follow_a_change() -> None:
    rounds = Rounds(16)
    rounds.run(CHAIN, [0.9] * 3, 300)
    high = rounds.tokens()[CHAIN]
    rounds.run(CHAIN, [0.2] * 3, 300)
    assert high == pytest.approx(tokens_of([0.9] * 3, 3), abs=0.15)
    assert rounds.tokens()[CHAIN] == pytest.approx(tokens_of([0.2] * 3, 3), abs=0.15)


def test_requests_differ() -> None:
    """Half of them accept everything, half nothing: each is known by itself, in shapes that did not run for it too."""
    rounds = Rounds(20)
    accepts = np.arange(20) % 2 == 0
    for _ in range(100):
        rounds.record(CHAIN, CHAIN, np.where(accepts, 3, 0).astype(np.int32))
    survival, one = rounds.survival, np.ones(1, np.bool_)
    for i in range(20):
        _, short, chain, tree = survival.expected_tokens(rounds.slots[i : i + 1], rounds.numbers[i : i + 1], one)[0]
        high, low = chain > 3.2 and short > 1.7 and tree > 4, chain < 1.8 and short < 1.3 and tree < 3.5
        assert high if accepts[i] else low


def test_a_text_whose_drafts_fail_early_promises_little_of_deep_trees() -> None:
    """Six rounds after texts that accept 4.9 tokens: depths that it never reached follow those where it failed."""
    rounds = Rounds(4)
    rounds.run(TREE, [0.9] * 5, 300)
    rounds.numbers = rounds.numbers + 100
    for step in range(6):
        accepted = [0, 1, 0, 0] if step % 2 else [1, 0, 0, 1]
        rounds.record(TREE, TREE, np.array(accepted, np.int32))
    assert rounds.tokens()[TREE] < 2.6 and rounds.tokens()[CHAIN] < 1.9


def test_more_is_hoped_of_a_fresh_request_where_requests_differ() -> None:
    """Texts in turns, of which some accept all drafts and others none, or which all accept two; what is expected of the
    next one is as good."""
    hoped = []
    for accepted in ((0, 3), (2, 1)):
        rounds = Rounds(1)
        for number in range(30):
            rounds.numbers = rounds.numbers + 1
            for step in range(20):
                often = accepted[number % 2] if accepted == (0, 3) else accepted[step % 2]
                rounds.record(CHAIN, CHAIN, np.array([often], np.int32))
            rounds.tokens()
        rounds.numbers = rounds.numbers + 1
        expected, upper = rounds.tokens()[CHAIN], rounds.tokens(hoped=True)[CHAIN]
        hoped.append((upper - 1) / (expected - 1))
        for _ in range(40):
            rounds.record(CHAIN, CHAIN, np.array([0], np.int32))
        assert rounds.tokens(hoped=True)[CHAIN] < 1.5, "its own rounds tell enough"
    differ, equal = hoped
    assert differ > 1.3 and equal < 1.12, hoped


def test_a_slot_s_next_request_is_not_its_last_one() -> None:
    rounds = Rounds(2)
    for _ in range(100):
        rounds.record(CHAIN, CHAIN, np.array([3, 0], np.int32))
    new = rounds.survival.expected_tokens(rounds.slots, rounds.numbers + 1, np.ones(2, np.bool_))[0][CHAIN]
    ones = np.ones(1, np.bool_)
    each = [rounds.survival.expected_tokens(s, u, ones)[0][CHAIN] for s, u in zip(
        rounds.slots[:, None], rounds.numbers[:, None] + 1, strict=True)]  # fmt: skip
    assert each[0] == each[1] == pytest.approx(new / 2)


def test_requests_without_drafts_count_one_token() -> None:
    rounds = Rounds(4)
    rounds.run(CHAIN, [0.9] * 3, 200)
    rounds.record(CHAIN, CHAIN, np.full(4, -1, np.int32))
    some = np.array([True, False, False, True])
    tokens, _ = rounds.survival.expected_tokens(rounds.slots, rounds.numbers, some)
    alone = rounds.survival.expected_tokens(rounds.slots[some], rounds.numbers[some], np.ones(2, np.bool_))[0]
    assert tokens[CHAIN] == pytest.approx(2 + alone[CHAIN]) and alone[CHAIN] > 6
    assert rounds.survival.expected_tokens(rounds.slots, rounds.numbers, ~(some | True))[0].tolist() == [4.0] * 4
    assert rounds.survival.expected_tokens(rounds.slots[:0], rounds.numbers[:0], some[:0])[0].tolist() == [0.0] * 4


def test_a_tree_is_guessed_from_a_chain_and_then_known() -> None:
    rounds = Rounds(8)
    rounds.run(CHAIN, [0.6] * 3, 200)
    guessed = rounds.tokens()[TREE]
    assert tokens_of([0.6] * 5, 5) < guessed < tokens_of([0.95] * 5, 5)
    assert rounds.tokens(hoped=True)[TREE] > guessed + 0.3
    rounds.run(TREE, [0.75] * 5, 300)
    assert rounds.tokens()[TREE] == pytest.approx(tokens_of([0.75] * 5, 5), abs=0.2)
    assert rounds.tokens()[CHAIN] == pytest.approx(tokens_of([0.6] * 3, 3), abs=0.3)


def test_what_is_known_of_drafts_ages_while_none_run() -> None:
    """So that more may be hoped for, and less is needed to learn that they have become right."""
    rounds = Rounds(8)
    rounds.run(CHAIN, [0.2] * 3, 300)
    before, hoped = rounds.tokens()[CHAIN], rounds.tokens(hoped=True)[CHAIN]
    for _ in range(6000):
        rounds.survival.age(8)
    assert rounds.tokens()[CHAIN] == pytest.approx(before, abs=0.2)
    assert rounds.tokens(hoped=True)[CHAIN] > hoped + 0.05


def test_a_step_takes_microseconds() -> None:
    """The time of 64 steps that are counted together, as a multiple of one comparison in numpy (about 0.4 us on an
    idle machine); the best of many, so that others' load does not count."""
    count, num_steps, everyone = 128, 64, np.ones(128, np.bool_)
    rounds = Rounds(count)
    accepted = np.arange(count, dtype=np.int32) % 4
    drafted = np.full(count, CHAIN)

    def best_s(function: object, repeats: int = 30) -> float:
        times = []
        for _ in range(repeats):
            started_s = time.perf_counter()
            for _ in range(num_steps):
                function()  # type: ignore[operator]
            rounds.survival.expected_tokens(rounds.slots, rounds.numbers, everyone)
            times.append((time.perf_counter() - started_s) / num_steps)
        return min(times)

    one = best_s(lambda: rounds.slots < 5)
    whole = best_s(lambda: rounds.survival.record(rounds.slots, rounds.numbers, drafted, CHAIN, accepted))
    assert whole < 50 * one, f"{whole * 1e6:.0f} us, one comparison {one * 1e6:.2f} us"
