"""Shapes for copied drafts: a text without matches is decoded plainly, a copied one by wide rounds, and each change of
a text is followed within a few rounds."""

import numpy as np
import pytest

from aerie.workers.scheduling.shapes.acceptance import MATCH_LENGTHS, Acceptance
from tests.support.simulation.copied import COSTS, SHAPES, CopiedTexts, share

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
    of_best, _, seen = share(copied, free, batch, costs, seed=batch)
    assert of_best > (0.93 if copied and batch > 1 else 0.97), (of_best, seen)
    if copied and batch == 1:
        assert of_best > 1.03, (of_best, seen)


def test_a_change_of_the_text_is_followed_at_once() -> None:
    """One request, at batch 1 of a CPU: copied for 600 tokens, then not for 200."""
    texts = CopiedTexts(600, 200, 1, "cpu")
    texts.rate(800)
    texts.seen.clear()
    texts.rate(600 - texts.done[0] % 800)
    wide, plain = texts.seen["suffix/15"], texts.seen["plain"]
    assert wide > 35 and plain < 12, texts.seen
    texts.seen.clear()
    texts.rate(200)
    assert texts.seen["plain"] > 140, texts.seen


def test_a_new_request_knows_nothing_of_the_former_one() -> None:
    acceptance = Acceptance(SHAPES, 2)
    slots, matches = np.array([0, 1]), np.array([[15, 16], [-1, 0]], np.int32)
    for _ in range(40):
        acceptance.record_matches(slots, slots, acceptance.classes(slots, slots), np.array([16, 1], np.int32), matches)
    everyone = np.ones(2, np.bool_)
    first = acceptance.expected_tokens(slots[:1], slots[:1], everyone[:1])[0]
    other = acceptance.expected_tokens(slots[1:], slots[1:], everyone[1:])[0]
    assert first[3] > 14 and other[3] < 1.5 and first[0] == other[0] == 1
    assert acceptance.classes(slots, slots).tolist() == [len(MATCH_LENGTHS), 0]
    assert acceptance.classes(slots, np.array([7, 1])).tolist() == [0, 0]


def test_rounds_after_one_that_uses_the_match_up_have_estimates_of_their_own() -> None:
    """Copied JSON of the embedded pair: 0.4 to 0.8 of the first drafts were right after a plain round, 0.2 after one
    that had verified the match's drafts; by one estimate for both, half of the rounds were wide for nothing."""
    acceptance, slots, everyone = Acceptance(SHAPES, 1), np.arange(1), np.ones(1, np.bool_)
    for i in range(400):
        verifies = i % 2 == 1
        acceptance.set_in_flight(slots, np.array([verifies]))
        num_correct = -1 if verifies else 3
        counts, matches = np.array([1 if verifies else 4], np.int32), np.array([[num_correct, 4, 0]], np.int32)
        acceptance.record_matches(slots, slots, acceptance.classes(slots, slots), counts, matches)
    tokens = []
    for verifies in (False, True):
        acceptance.set_in_flight(slots, np.array([verifies]))
        tokens.append(acceptance.expected_tokens(slots, slots, everyone)[0][1])
    assert tokens[0] > 3.5 and tokens[1] < 1.3, tokens


@pytest.mark.parametrize("batch", [1, 3])
def test_reports_that_are_counted_together_count_as_much(batch: int) -> None:
    """Every class's hits and trials are those of reports counted one by one, up to the decay within a few steps."""
    together, alone, random = Acceptance(SHAPES, batch), Acceptance(SHAPES, batch), np.random.default_rng(0)
    slots = np.arange(batch)
    for _ in range(16):
        lengths, correct = random.integers(0, 16, batch), random.integers(-1, 4, batch)
        counts = np.maximum(correct, 0) + 1
        matches = np.stack((correct, lengths, lengths), 1).astype(np.int32)
        for each in (together, alone):
            each.record_matches(slots, slots, each.classes(slots, slots), counts.astype(np.int32), matches)
        alone._count()
    together._count()
    assert together._trials == pytest.approx(alone._trials, rel=0.05)
    assert together._hits == pytest.approx(alone._hits, rel=0.05)
    assert together._own_hits == pytest.approx(alone._own_hits, rel=0.5)
    assert together._own_trials == pytest.approx(alone._own_trials, rel=0.5)
