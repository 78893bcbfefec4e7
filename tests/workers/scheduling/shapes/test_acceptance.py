"""`Acceptance` against chances that are known, and on recorded answers."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.speculative.tree_shape import TreeShape
from aerie.workers.config import PLAIN, RoundShapes
from aerie.workers.scheduling.shapes.acceptance import Acceptance
from tests.support.simulation.streams import Stream, in_orders, static_rounds
from tests.support.simulation.texts import DRAFTS, Answer, costs_of, recorded, recorded_shapes
from tests.support.slow import slow

ONE, CHAIN, TREE = 1, 2, 3
SHAPES = RoundShapes(
    (PLAIN, TreeShape.of(1, 1, 2), TreeShape.of(3, 1, 4), TreeShape.of(5, 4, 16)), default=3, adaptive=True
)
DEPTH = {ONE: 1, CHAIN: 3, TREE: 5}
BLOCK = recorded_shapes("dflash2")
BLOCK_CHAIN = 2  # 4/1/5
SLOT, SPECULATES = np.zeros(1, np.int64), np.ones(1, np.bool_)
EVEN = 0.3  # nats of a text that is as hard everywhere


class Rounds:
    """Rounds of `count` requests whose drafts are accepted with these chances, by depth."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.acceptance = Acceptance(SHAPES, count + 3)
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

    def record(self, drafted: int, shape: int, accepted: np.ndarray, nats: np.ndarray | None = None) -> None:
        self.acceptance.record(shape, self.slots, self.numbers, np.full(len(self.slots), drafted), accepted, nats)

    def plain(self, nats: float | np.ndarray) -> None:
        """Run a round without drafts."""
        count = len(self.slots)
        self.record(0, 0, np.full(count, -1, np.int32), np.full(count, nats))

    def of_each(self, shape: int) -> list[float]:
        """Return each request's expected tokens."""
        each, one = zip(self.slots[:, None], self.numbers[:, None], strict=True), np.ones(1, np.bool_)
        return [float(self.acceptance.expected_tokens(*request, one)[0][shape]) for request in each]

    def tokens(self, hoped: bool = False) -> list[float]:
        """Expected of each shape, or hoped for, per request."""
        everyone = np.ones(len(self.slots), np.bool_)
        both = np.array(self.acceptance.expected_tokens(self.slots, self.numbers, everyone)) / len(self.slots)
        assert np.isfinite(both).all() and (both[1] >= both[0]).all() and (both[0] >= 1).all()
        return both[int(hoped)].tolist()


class Request:
    """One request after the other in one slot."""

    def __init__(self) -> None:
        self.acceptance, self.number = Acceptance(BLOCK, 1), np.zeros(1, np.int64)

    def next(self) -> None:
        self.number = self.number + 1

    def draft(self, accepted: list[int], shape: int = BLOCK_CHAIN) -> None:
        """Run a round with drafts for each of these numbers of accepted drafts."""
        for count in accepted:
            drafted, nats = np.full(1, shape), np.full(1, EVEN)
            self.acceptance.record(shape, SLOT, self.number, drafted, np.full(1, count, np.int32), nats)
            self.tokens()

    def plain(self, count: int) -> None:
        for _ in range(count):
            self.acceptance.record(0, SLOT, self.number, SLOT, np.full(1, -1, np.int32), np.full(1, EVEN))
            self.tokens()

    def tokens(self) -> float:
        """Expected tokens of a round of the chain."""
        return float(self.acceptance.expected_tokens(SLOT, self.number, SPECULATES)[0][BLOCK_CHAIN])


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
    one = np.ones(1, np.bool_)
    for i in range(20):
        slots, numbers = rounds.slots[i : i + 1], rounds.numbers[i : i + 1]
        _, short, chain, tree = rounds.acceptance.expected_tokens(slots, numbers, one)[0]
        high, low = chain > 3.2 and short > 1.7 and tree > 4, chain < 1.8 and short < 1.3 and tree < 3.5
        assert high if accepts[i] else low


def test_a_text_whose_drafts_fail_early_promises_little_of_deep_trees() -> None:
    """Sixteen rounds after texts that accept 4.9 tokens: depths that it never reached follow those where it failed."""
    rounds = Rounds(4)
    rounds.run(TREE, [0.9] * 5, 300)
    assert rounds.tokens()[TREE] > 4.4
    rounds.numbers = rounds.numbers + 100
    for step in range(16):
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
    new = rounds.acceptance.expected_tokens(rounds.slots, rounds.numbers + 1, np.ones(2, np.bool_))[0][CHAIN]
    ones = np.ones(1, np.bool_)
    each = [rounds.acceptance.expected_tokens(s, u, ones)[0][CHAIN] for s, u in zip(
        rounds.slots[:, None], rounds.numbers[:, None] + 1, strict=True)]  # fmt: skip
    assert each[0] == each[1] == pytest.approx(new / 2)


def test_requests_without_drafts_count_one_token() -> None:
    rounds = Rounds(4)
    rounds.run(CHAIN, [0.9] * 3, 200)
    rounds.record(CHAIN, CHAIN, np.full(4, -1, np.int32))
    some = np.array([True, False, False, True])
    tokens, _ = rounds.acceptance.expected_tokens(rounds.slots, rounds.numbers, some)
    alone = rounds.acceptance.expected_tokens(rounds.slots[some], rounds.numbers[some], np.ones(2, np.bool_))[0]
    assert tokens[CHAIN] == pytest.approx(2 + alone[CHAIN]) and alone[CHAIN] > 6
    assert rounds.acceptance.expected_tokens(rounds.slots, rounds.numbers, ~(some | True))[0].tolist() == [4.0] * 4
    assert rounds.acceptance.expected_tokens(rounds.slots[:0], rounds.numbers[:0], some[:0])[0].tolist() == [0.0] * 4


def test_a_tree_is_guessed_from_a_chain_and_then_known() -> None:
    rounds = Rounds(8)
    rounds.run(CHAIN, [0.6] * 3, 200)
    guessed = rounds.tokens()[TREE]
    assert tokens_of([0.6] * 5, 5) < guessed < tokens_of([0.95] * 5, 5)
    assert rounds.tokens(hoped=True)[TREE] > guessed + 0.3
    rounds.run(TREE, [0.75] * 5, 300)
    assert rounds.tokens()[TREE] == pytest.approx(tokens_of([0.75] * 5, 5), abs=0.2)
    assert rounds.tokens()[CHAIN] == pytest.approx(tokens_of([0.6] * 3, 3), abs=0.3)


@pytest.mark.parametrize("width", [16, 64, 256])
def test_a_width_that_never_ran_is_interpolated(width: int) -> None:
    """Between a chain and a wide tree that did, and beyond them."""
    trees = [TreeShape("tree", nodes, 9, 0, 8, 8) for nodes in (12, width, 128)]
    shapes = RoundShapes((PLAIN, TreeShape.of(8, 1, 9), *trees), default=4, adaptive=True)
    acceptance, random, slots = Acceptance(shapes, 32), np.random.default_rng(1), np.arange(32)
    for _ in range(100):
        for shape, chance in ((1, 0.6), (4, 0.75)):
            accepted = (random.random((32, 8)) < chance).cumprod(1).sum(1).astype(np.int32)
            acceptance.record(shape, slots, slots, np.full(32, shape), accepted)
    tokens = acceptance.expected_tokens(slots, slots, np.ones(32, np.bool_))[0] / 32
    assert tokens[1] == pytest.approx(tokens_of([0.6] * 8, 8), rel=0.06)
    assert tokens[4] == pytest.approx(tokens_of([0.75] * 8, 8), rel=0.06)
    assert tokens[1] < tokens[2] < tokens[4]
    assert (width < 128) == (tokens[3] < tokens[4]) and tokens[3] > tokens[2]


def test_what_is_known_of_drafts_ages_while_none_run() -> None:
    """So that more may be hoped for, and less is needed to learn that they have become right."""
    rounds = Rounds(64)
    rounds.run(CHAIN, [0.2] * 3, 100)
    before, hoped = rounds.tokens()[CHAIN], rounds.tokens(hoped=True)[CHAIN]
    for _ in range(1000):
        rounds.plain(EVEN)
    assert rounds.tokens()[CHAIN] == pytest.approx(before, abs=0.2)
    assert rounds.tokens(hoped=True)[CHAIN] > hoped + 0.05


def test_a_request_whose_drafts_just_failed_is_expected_to_recover() -> None:
    """Only rounds with drafts show that hard words are over. Without them, the request would decode without drafts to
    its end."""
    request = Request()
    for _ in range(30):
        request.next()
        request.draft([4, 1, 4, 2, 4, 3] * 2)
    usual = request.tokens()
    request.draft([0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0])
    failing = request.tokens()
    request.plain(40)
    assert usual > 3.4 and failing < 0.8 * usual and request.tokens() > 0.85 * usual


def test_a_request_whose_drafts_always_fail_is_not_expected_to_recover() -> None:
    request = Request()
    for _ in range(30):
        request.next()
        request.draft([4, 1, 4, 2, 4, 3] * 2)
    request.next()
    for _ in range(20):
        request.draft([0, 0, 1, 0])
        request.plain(8)
    assert request.tokens() < 2.2


def test_a_fresh_request_begins_as_recent_ones_were() -> None:
    """A thousand rounds of good text, then a hundred of ten requests whose drafts fail."""
    request = Request()
    for _ in range(80):
        request.next()
        request.draft([4, 1, 4, 2, 4, 3] * 2)
    request.next()
    good = request.tokens()
    for _ in range(10):
        request.next()
        request.draft([1, 0, 0, 1, 0, 2, 0, 0, 1, 0])
    request.next()
    assert request.tokens() - 1 < 0.75 * (good - 1)


def test_a_request_that_the_target_is_surer_of_accepts_more_also_after_plain_rounds() -> None:
    rounds = Rounds(4)
    for _ in range(50):
        rounds.record(CHAIN, CHAIN, np.array([3, 2, 1, 0], np.int32), np.full(4, 0.5))
    rounds.numbers = rounds.numbers + 1
    for _ in range(50):
        rounds.plain(np.array([0.1, 0.5, 2.0, np.nan]))
    easy, usual, hard, unknown = rounds.of_each(CHAIN)
    assert easy > usual + 0.3 and hard < usual - 0.6 and hard < unknown < easy


def test_a_fresh_request_begins_as_certain_as_the_last_ones_were() -> None:
    rounds = Rounds(2)
    for _ in range(200):
        rounds.record(CHAIN, CHAIN, np.array([2, 1], np.int32), np.full(2, 1.0))
    before = rounds.tokens()[CHAIN]
    for _ in range(300):
        rounds.plain(0.2)
    rounds.numbers = rounds.numbers + 1
    assert rounds.tokens()[CHAIN] > before + 0.25


def test_a_tree_that_ran_on_easy_text_alone_promises_less_on_a_hard_one() -> None:
    """Each row's counts are compared with the certainty in the rounds that they are from."""
    tokens = []
    for nats in (0.2, 1.2):
        rounds = Rounds(1)
        for step in range(300):
            rounds.record(TREE, TREE, np.array([(5, 2, 0)[step % 3]], np.int32), np.full(1, nats))
        for _ in range(100):
            rounds.plain(1.2)
        tokens.append(rounds.tokens()[TREE])
    assert tokens[0] < tokens[1] - 0.8


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.lists(st.floats(-1.0, 15.0) | st.just(float("nan")), min_size=3, max_size=3),
            st.booleans(),
        ),
        max_size=20,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_report_leaves_finite_estimates(steps: list[tuple[int, list[float], bool]]) -> None:
    rounds = Rounds(3)
    for shape, nats, is_new in steps:
        accepted = np.array([-1, 0, DEPTH.get(shape, -1)], np.int32) if shape else np.full(3, -1, np.int32)
        rounds.record(shape, shape, accepted, np.array(nats))
        rounds.numbers = rounds.numbers + is_new
        rounds.tokens()


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
            rounds.acceptance.expected_tokens(rounds.slots, rounds.numbers, everyone)
            times.append((time.perf_counter() - started_s) / num_steps)
        return min(times)

    one = best_s(lambda: rounds.slots < 5)
    whole = best_s(lambda: rounds.acceptance.record(CHAIN, rounds.slots, rounds.numbers, drafted, accepted))
    assert whole < 50 * one, f"{whole * 1e6:.0f} us, one comparison {one * 1e6:.2f} us"


def of_static(draft: str, shape: int, order: tuple[str, ...]) -> list[tuple[float, float, float]]:
    """Run one shape for six rounds and none for twelve in turns, on each kind of text twice. Return,
    after each twelve, the expected tokens a round, the actual ones over the next 16 tokens, and their rounds."""
    acceptance, number, found = Acceptance(recorded_shapes(draft), 1), np.zeros(1, np.int64), []
    for answer in (answer for kind in order for answer in recorded(draft)[kind] * 2 if answer.num_tokens > 1):
        number, rounds = number + 1, static_rounds(answer)[shape]
        step = at = 0
        while at < answer.num_tokens - 1:
            runs = shape if step % 18 < 6 else 0
            if step % 18 == 17 and at + 16 < answer.num_tokens:
                expected = float(acceptance.expected_tokens(SLOT, number, SPECULATES)[0][shape])
                weight = float(rounds[at + 16] - rounds[at])
                found.append((expected, 16 / weight, weight))
            accepted = _accepted(answer, shape, at) if runs else np.full(1, -1, np.int32)
            acceptance.record(runs, SLOT, number, np.full(1, runs), accepted, np.full(1, answer.min_entropies[at]))
            at, step = at + 1 + int(_accepted(answer, shape, at)[0]) * (runs > 0), step + 1
    return found


def _accepted(answer: Answer, shape: int, at: int) -> np.ndarray:
    return np.full(1, answer.accepted[shape - 1][at], np.int32)


@pytest.mark.parametrize("draft", ["dspark", *slow(*(draft for draft in DRAFTS if draft != "dspark"))])
def test_estimates_of_recorded_answers_are_not_exaggerated(draft: str) -> None:
    """In two orders of texts: the error in tokens a round, of 0.72 to 0.77. With slopes of min-entropy that ran away,
    and with requests held to their first rounds, errors were 0.91 to 0.96; where offsets counted again what the cells
    had learned, 0.80 to 0.93."""
    order = ("gsm8k", "mt_bench", "humaneval", "JSON to copy")
    found = []
    for shape in range(1, len(recorded_shapes(draft))):
        for each in (order, order[::-1]):
            points = of_static(draft, shape, each)
            found += [((expected - actual) ** 2, weight) for expected, actual, weight in points]
    squares, weights = np.array(found).T
    assert np.sqrt(np.average(squares, weights=weights)) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_recorded_streams_reach_their_best_shape(draft: str) -> None:
    """Steps 200 to 600 of each kind of text in all orders, one request at a time: means of 0.986, 0.979 and 0.973, with
    standard errors of 0.001 to 0.003. Six orders would have 0.003 to 0.006, as much as two versions of the choice
    differ by."""
    shapes, found = recorded_shapes(draft), []
    answers = {kind: [each for each in some if each.num_tokens > 1] for kind, some in recorded(draft).items()}
    for seed, order in enumerate(in_orders(list(answers), 24)):
        stream = Stream(shapes, costs_of(shapes), seed=seed)
        for kind in order:
            stream.run(answers[kind], 200)
            found.append(stream.run(answers[kind], 400).share)
    assert np.mean(found) > {"dspark": 0.98, "eagle3": 0.975, "dflash2": 0.97}[draft] and min(found) > 0.88, found


@pytest.mark.parametrize(
    ("draft", "mean", "low"), [("eagle3", 0.97, 0.9), *slow(("dspark", 0.98, 0.93), ("dflash2", 0.955, 0.88))]
)
def test_plain_rounds_tell_that_a_text_has_become_easy(draft: str, mean: float, low: float) -> None:
    """Steps 200 to 600 of each kind of text, one after the other, one request at a time. When only drafts told what
    they were worth, means were 0.952 (DSpark) and 0.941 (EAGLE-3), the lowest 0.81 and 0.73; of EAGLE-3 they are 0.975
    and 0.918."""
    shapes, found = recorded_shapes(draft), []
    answers = {kind: [each for each in some if each.num_tokens > 1] for kind, some in recorded(draft).items()}
    for order in in_orders(list(answers), 4):
        stream = Stream(shapes, costs_of(shapes))
        for kind in order:
            stream.run(answers[kind], 200)
            found.append(stream.run(answers[kind], 400).share)
    assert np.mean(found) > mean and min(found) > low, found
