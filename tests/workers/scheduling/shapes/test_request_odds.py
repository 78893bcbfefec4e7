"""Requests whose drafts fail for a while, and texts that follow each other."""

import numpy as np
import pytest

from aerie.workers.scheduling.acceptance.survival import Survival
from tests.support.simulation.streams import Stream, in_orders, static_rounds
from tests.support.simulation.texts import DRAFTS, Answer, costs_of, recorded
from tests.support.slow import slow

CHAIN = 2  # of DFlash2: 4/1/5
SHAPES = DRAFTS["dflash2"].shapes
SLOT, ONE = np.zeros(1, np.int64), np.ones(1, np.bool_)
EVEN = 0.3  # nats of a text that is as hard everywhere


class Request:
    """One request after the other in one slot."""

    def __init__(self) -> None:
        self.survival, self.number = Survival(SHAPES, 1), np.zeros(1, np.int64)

    def next(self) -> None:
        self.number = self.number + 1

    def draft(self, accepted: list[int], shape: int = CHAIN) -> None:
        """Run a round with drafts for each of these numbers of accepted drafts."""
        for count in accepted:
            self.survival.record_entropies(SLOT, self.number, shape, np.full(1, EVEN))
            self.survival.record(SLOT, self.number, np.full(1, shape), shape, np.full(1, count, np.int32))
            self.tokens()

    def plain(self, count: int) -> None:
        for _ in range(count):
            self.survival.record_entropies(SLOT, self.number, 0, np.full(1, EVEN))
            self.tokens()

    def tokens(self) -> float:
        """Expected tokens of a round of the chain."""
        return float(self.survival.expected_tokens(SLOT, self.number, ONE)[0][CHAIN])


def test_a_request_whose_drafts_just_failed_is_expected_to_recover() -> None:
    """Only rounds with drafts show that hard words are over. Without them, the request would decode without drafts to
    its end (former estimate after the rounds without drafts: 2.8, as before them)."""
    request = Request()
    for _ in range(30):
        request.next()
        request.draft([4, 1, 4, 2, 4, 3] * 2)
    usual = request.tokens()
    request.draft([0, 0, 1, 0, 0, 1, 0, 0])
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
    """A thousand rounds of good text, then a hundred of ten requests whose drafts fail (formerly 3.7 of 4.0 tokens)."""
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


def of_static(draft: str, shape: int, order: tuple[str, ...]) -> tuple[Survival, list[tuple[float, float, float]]]:
    """Run one shape for six rounds and none for twelve in turns, on each kind of text twice. Return the estimates, and
    after each twelve the expected tokens a round, the actual ones over the next 16 tokens, and their rounds."""
    survival, number, found = Survival(DRAFTS[draft].shapes, 1), np.zeros(1, np.int64), []
    for answer in (answer for kind in order for answer in recorded(draft)[kind] * 2 if answer.num_tokens > 1):
        number, rounds = number + 1, static_rounds(answer)[shape]
        step = at = 0
        while at < answer.num_tokens - 1:
            runs = shape if step % 18 < 6 else 0
            if step % 18 == 17 and at + 16 < answer.num_tokens:
                expected = float(survival.expected_tokens(SLOT, number, ONE)[0][shape])
                weight = float(rounds[at + 16] - rounds[at])
                found.append((expected, 16 / weight, weight))
            survival.record_entropies(SLOT, number, runs, np.full(1, answer.min_entropies[at]))
            if runs:
                survival.record(SLOT, number, np.full(1, shape), shape, _accepted(answer, shape, at))
            at, step = at + 1 + int(_accepted(answer, shape, at)[0]) * (runs > 0), step + 1
    return survival, found


def _accepted(answer: Answer, shape: int, at: int) -> np.ndarray:
    return np.full(1, answer.accepted[shape - 1][at], np.int32)


@pytest.mark.parametrize("draft", ["dspark", *slow(*(draft for draft in DRAFTS if draft != "dspark"))])
def test_estimates_of_recorded_answers_are_not_exaggerated(draft: str) -> None:
    """In two orders of texts: the error in tokens a round. Before, slopes of min-entropy ran away up to their bound of
    5, and requests were held to what their first rounds had accepted; errors were 0.91 to 0.96."""
    order = ("gsm8k", "mt_bench", "humaneval", "JSON to copy")
    found = []
    for shape in range(1, len(DRAFTS[draft].shapes)):
        for each in (order, order[::-1]):
            survival, points = of_static(draft, shape, each)
            found += [((expected - actual) ** 2, weight) for expected, actual, weight in points]
            assert survival._difficulty.slope < 2.5
    squares, weights = np.array(found).T
    assert np.sqrt(np.average(squares, weights=weights)) < 0.87


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_recorded_streams_reach_their_best_shape(draft: str) -> None:
    """Steps 200 to 600 of each kind of text in six orders, one request at a time. Means were 0.973, 0.968 and 0.958."""
    shapes, found = DRAFTS[draft].shapes, []
    answers = {kind: [each for each in some if each.num_tokens > 1] for kind, some in recorded(draft).items()}
    for seed, order in enumerate(in_orders(list(answers), 6)):
        stream = Stream(shapes, costs_of(shapes), seed=seed)
        for kind in order:
            stream.run(answers[kind], 200)
            found.append(stream.run(answers[kind], 400).share)
    assert np.mean(found) > {"dspark": 0.98, "eagle3": 0.975, "dflash2": 0.96}[draft] and min(found) > 0.88, found
