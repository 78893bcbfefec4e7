"""`MatchSurvival`, and the shapes that are chosen by it: a text without matches is decoded plainly, a copied one by
wide rounds, and each change of a text is followed within a few rounds."""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from aerie.speculative.tree_shape import suffix_shapes
from aerie.workers.scheduling.acceptance.match_survival import CLASS_STARTS, MatchSurvival
from aerie.workers.scheduling.shape_choice import Load, ShapeChoice
from aerie.workers.scheduling.timing.step import Step
from aerie.workers.scheduling.timing.step_time import StepTime
from tests.support.simulation.shapes import CHAIN_MS, CPU_PLAIN_MS, PLAIN_MS, between, table

SHAPES = suffix_shapes(15, adaptive=True)
WIDE_MS = (5.6, 8.5, 17.0, 30.0, 56.0, 108.0)  # 16 rows of a request, as estimated for Qwen3-8B on an H200
COSTS = {
    "gpu": table(PLAIN_MS, CHAIN_MS, between(CHAIN_MS, WIDE_MS, 0.4), WIDE_MS),
    # a CPU, where rows cost what they compute
    "cpu": table(CPU_PLAIN_MS, *(tuple(ms * f for ms in CPU_PLAIN_MS) for f in (1.6, 2.3, 3.8)), kv_ms=1e-4),
}
IN_FLIGHT = 2
Ints = npt.NDArray[np.int64]


@dataclass
class Texts:
    """Requests whose texts copy and do not, by turns, and an engine that drafts from matches.

    copied, free: tokens of a stretch of either kind. Copied tokens have a match of 12 and are right with chance 0.97;
    free ones have one of 2 with chance 0.3, right with 0.2.
    """

    copied: int
    free: int
    batch: int
    costs: str
    seed: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.choice = ShapeChoice(SHAPES, self.batch)
        self.step_time = StepTime(COSTS[self.costs], self.batch)
        self.slots = np.arange(self.batch)
        self.done = self.slots * (self.copied + self.free) // self.batch  # tokens of each text
        self.length = np.zeros(self.batch, np.int64)
        self.late: deque[tuple[Ints, Ints, Ints, Step, float]] = deque()

    def rate(self, num_tokens: int, fixed: int | None = None) -> float:
        """Tokens per millisecond of about so many tokens of each text. fixed: the shape of all."""
        tokens = ms = 0.0
        speculative = np.ones(self.batch, np.bool_)
        while tokens < num_tokens * self.batch:
            verifies = np.full(self.batch, bool(self.late) and self.late[-1][3].shape > 0)
            load = Load(self.slots, self.slots, speculative, 0, verifies=verifies)
            shape = self.choice.choose(load, self.step_time) if fixed is None else fixed
            known = self.choice.match_classes(self.slots, self.slots)
            assert known is not None
            counts, num_correct = self.round(SHAPES[shape].depth)
            took = COSTS[self.costs].round_ms(shape, self.batch)
            matches = np.stack((num_correct, self.length), 1)
            self.late.append((known, counts, matches, Step(shape, self.batch), took * self.random.lognormal(0, 0.02)))
            self.seen[SHAPES[shape].name] += 1
            tokens, ms = tokens + counts.sum(), ms + took
            if len(self.late) == IN_FLIGHT and fixed is None:
                known, counts, matches, ran, noisy = self.late.popleft()
                self.step_time.observe(ran, noisy)
                self.choice.observe(self.slots, self.slots, known, counts.astype(np.int32), matches.astype(np.int32))
        return tokens / ms

    def round(self, depth: int) -> tuple[Ints, Ints]:
        """Emitted tokens, and how many were num_correct; then what the next rounds' matches are."""
        ahead = self.done[:, None] + np.arange(depth + 1)
        copies = ahead % max(1, self.copied + self.free) < self.copied
        right = np.where(copies, 0.97, np.where(copies[:, :1], 0.0, 0.2)) * (self.length > 0)[:, None]
        equal = (self.random.random(right.shape) < right).cumprod(1).sum(1)
        counts = np.minimum(equal, depth) + 1
        num_correct = np.where(self.length > 0, equal, -1)
        self.done = self.done + counts
        copies_next = self.done % max(1, self.copied + self.free) < self.copied
        self.length = np.where(copies_next, 12, 2 * (self.random.random(self.batch) < 0.3))
        return counts, num_correct


CASES = [
    (*text, batch, costs) for costs in COSTS for text in ((0, 100), (60, 60), (25, 200), (300, 300)) for batch in (1, 8)
]


@pytest.mark.parametrize(
    ("copied", "free", "batch", "costs"),
    [pytest.param(*case, marks=() if i == 8 else pytest.mark.slow) for i, case in enumerate(CASES)],
)
def test_it_is_as_good_as_the_best_static_shape(copied: int, free: int, batch: int, costs: str) -> None:
    """And better where one text is copied in part. A static shape has no exploration to pay for. In a batch, each step
    takes what is best for it alone; slower rounds would let more requests copy at once."""
    texts, cycles = Texts(copied, free, batch, costs, seed=batch), -(-600 // (copied + free)) * (copied + free)
    texts.rate(cycles)
    texts.seen.clear()
    rate = texts.rate(cycles)
    rates = [Texts(copied, free, batch, costs, seed=batch).rate(cycles, shape) for shape in range(len(SHAPES))]
    assert rate > (0.93 if copied and batch > 1 else 0.97) * max(rates), f"{rate / np.array(rates)}, {texts.seen}"
    if copied and batch == 1:
        assert rate > 1.03 * max(rates)


def test_a_change_of_the_text_is_followed_at_once() -> None:
    """One request, at batch 1 of a CPU: copied for 600 tokens, then not for 200."""
    texts = Texts(600, 200, 1, "cpu")
    texts.rate(800)
    texts.seen.clear()
    texts.rate(600 - texts.done[0] % 800)
    wide, plain = texts.seen["suffix/15"], texts.seen["plain"]
    assert wide > 35 and plain < 12, texts.seen
    texts.seen.clear()
    texts.rate(200)
    assert texts.seen["plain"] > 140, texts.seen


def test_a_new_request_knows_nothing_of_the_former_one() -> None:
    survival = MatchSurvival(SHAPES, 2)
    slots, matches = np.array([0, 1]), np.array([[15, 16], [-1, 0]], np.int32)
    for _ in range(30):
        survival.observe(slots, slots, survival.classes(slots, slots), np.array([16, 1], np.int32), matches)
    everyone = np.ones(2, np.bool_)
    first = survival.expected_tokens(slots[:1], slots[:1], everyone[:1])[0]
    other = survival.expected_tokens(slots[1:], slots[1:], everyone[1:])[0]
    assert first[3] > 14 and other[3] < 1.5 and first[0] == other[0] == 1
    assert survival.classes(slots, slots).tolist() == [len(CLASS_STARTS), 0]
    assert survival.classes(slots, np.array([7, 1])).tolist() == [0, 0]


def test_rounds_after_one_that_uses_the_match_up_have_estimates_of_their_own() -> None:
    """Copied JSON of the embedded pair: 0.4 to 0.8 of the first drafts were right after a plain round, 0.2 after one
    that had verified the match's drafts; by one estimate for both, half of the rounds were wide for nothing."""
    survival, slots, everyone = MatchSurvival(SHAPES, 1), np.arange(1), np.ones(1, np.bool_)
    for i in range(400):
        verifies = i % 2 == 1
        survival.set_in_flight(slots, np.array([verifies]))
        num_correct = -1 if verifies else 3
        counts, matches = np.array([1 if verifies else 4], np.int32), np.array([[num_correct, 4, 0]], np.int32)
        survival.observe(slots, slots, survival.classes(slots, slots), counts, matches)
    tokens = []
    for verifies in (False, True):
        survival.set_in_flight(slots, np.array([verifies]))
        tokens.append(survival.expected_tokens(slots, slots, everyone)[0][1])
    assert tokens[0] > 3.5 and tokens[1] < 1.3, tokens


@pytest.mark.parametrize("batch", [1, 3])
def test_reports_that_are_counted_together_count_as_much(batch: int) -> None:
    """Every class's hits and trials are those of reports counted one by one, up to the decay within a few steps."""
    together, alone, random = MatchSurvival(SHAPES, batch), MatchSurvival(SHAPES, batch), np.random.default_rng(0)
    slots = np.arange(batch)
    for _ in range(16):
        lengths, correct = random.integers(0, 16, batch), random.integers(-1, 4, batch)
        counts = np.maximum(correct, 0) + 1
        matches = np.stack((correct, lengths, lengths), 1).astype(np.int32)
        for each in (together, alone):
            each.observe(slots, slots, each.classes(slots, slots), counts.astype(np.int32), matches)
        alone._count_reports()
    together._count_reports()
    assert together._trials == pytest.approx(alone._trials, rel=0.05)
    assert together._hits == pytest.approx(alone._hits, rel=0.05)
    assert together._counts[:, :2] == pytest.approx(alone._counts[:, :2], rel=0.5)
