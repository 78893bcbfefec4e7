"""Estimates the acceptance of drafts that are copied from the request's own text, by length of the match.

Like `survival`, with two differences. First, estimates are by class: the length of the newest match that the host knows
(two steps old), or no match, and whether the round in flight verifies drafts, which use that match up. Second, rounds
without drafts count, too, because ranks propose tokens anyway and report how many were right.
"""

import numpy as np
import numpy.typing as npt

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.acceptance.survival import ENGINE_WINDOW, MARGIN, Bools, Floats, Ints, odds_and_bounds

CLASS_STARTS = (1, 3, 6, 12)  # match lengths, in tokens, at which classes begin; class 0: no match
NUM_LENGTHS = len(CLASS_STARTS) + 1
# initial probability of a class's first draft: without drafts in flight, and with them
FIRST_CHANCES = (0.05, 0.3, 0.5, 0.65, 0.8, 0.05, 0.2, 0.3, 0.5, 0.8)
PRIOR = 4.0  # prior weight, in rounds, of that probability, or of the previous draft's estimate
REQUEST_WINDOW = 64.0  # drafts after which the weight in a request's own estimate is 1 / e
REQUEST_PRIOR = 8.0  # prior weight, in drafts, of the engine's estimate in a request's own
ESTIMATE_SHARE = 1 / 128  # share of new rounds from which on the engine's estimates are recomputed
# Steps whose reports are counted together, which takes no longer than counting one: an evaluation counts at least
# COUNT_EVERY.
COUNT_EVERY, MAX_REPORTS = 4, 64
MAX_RATIO = 20.0  # bound on a request's odds relative to the engine's, either way


class MatchSurvival:
    """`Survival` for an engine with `RoundShapes.model_free`.

    Probabilities are conditional on the acceptance of all earlier drafts. A request's odds are the engine's times one
    ratio for all classes and depths, from its own counts.
    """

    def __init__(self, shapes: RoundShapes, num_slots: int) -> None:
        self._depth = np.array([shape.depth for shape in shapes.shapes], np.int64)
        self._max_depth = max(1, *self._depth.tolist())
        self._column = np.arange(self._max_depth)
        self._hits = np.zeros((len(FIRST_CHANCES), self._max_depth))
        self._trials = np.zeros_like(self._hits)
        self._chances = self._estimate()
        self._odds = odds_and_bounds(self._chances, self._trials + PRIOR)  # [2, classes, depth]
        self._ratios = np.ones(num_slots)  # see `_odds_ratios`
        self._num_new = 0  # rounds counted since `_chances` was estimated
        self._reports: list[tuple[Ints, Ints, Ints, npt.NDArray[np.int32], npt.NDArray[np.int32]]] = []  # not counted
        self._counts = np.zeros((num_slots, 3))  # hits, trials, expected hits
        self._numbers = np.full(num_slots, -1, np.int64)
        self._class = np.zeros(num_slots, np.int64)  # class of the newest known match's length
        self._in_flight = np.zeros(num_slots, np.int64)  # NUM_LENGTHS if the round in flight verifies drafts, else 0
        self._evaluated = np.zeros(num_slots, np.int64)  # the class at the last `expected_tokens`

    def family(self, shape: int) -> int:
        """Return 0, because all chains share their estimates."""
        return 0

    def depth(self, shape: int) -> int:
        """Return the number of drafts that a round of a shape can accept."""
        return int(self._depth[shape])

    def classes(self, slots: Ints, numbers: Ints) -> Ints:
        """Return [n]: the class of each request in the step being planned. numbers: [n] numbers of the requests in
        `slots`."""
        self._clear_reused(slots, numbers)
        return self._classes(slots)

    def _classes(self, slots: Ints) -> Ints:
        found: Ints = self._class[slots] + self._in_flight[slots]
        return found

    def set_in_flight(self, slots: Ints, verifies: Bools) -> None:
        """Set which requests have a round in flight that verifies drafts, [n]. Called before a step is planned."""
        self._in_flight[slots] = np.where(verifies, NUM_LENGTHS, 0)

    def classes_changed(self, slots: Ints) -> bool:
        """Return whether more than a quarter of these requests changed their class since the last `expected_tokens`."""
        return 4 * int(np.count_nonzero(self._classes(slots) != self._evaluated[slots])) > len(slots)

    def observe(
        self, slots: Ints, numbers: Ints, classes: Ints, counts: npt.NDArray[np.int32], matches: npt.NDArray[np.int32]
    ) -> None:
        """Learn from rounds of requests that speculate and have not ended. Stores the arrays, and counts them later.

        slots, numbers: [n] slots, and the numbers of the requests in them.
        classes: [n] `classes` when the step was planned; -1 if nothing was proposed (after a prompt's end).
        counts: [n] emitted tokens, at least 1.
        matches: [n, 3] as in `StepResult`.
        """
        self._clear_reused(slots, numbers)
        self._class[slots] = np.searchsorted(CLASS_STARTS, matches[:, 1], side="right")
        self._reports.append((slots, numbers, classes, counts, matches[:, 0]))
        if len(self._reports) == MAX_REPORTS:
            self._count_reports()

    def _count_reports(self) -> None:
        """Count all reports so far."""
        if not self._reports:
            return
        slots, numbers, classes, counts, num_correct = map(np.concatenate, zip(*self._reports, strict=True))
        self._reports.clear()
        ran = classes >= 0
        slots, numbers, classes = slots[ran], numbers[ran], classes[ran]
        num_correct = np.maximum(num_correct[ran, None], 0)
        tested = np.minimum(counts[ran, None], self._max_depth)
        hits = self._column < num_correct
        trials = self._column < num_correct + (num_correct < tested)
        of_class = (np.arange(len(FIRST_CHANCES))[:, None] == classes).astype(np.float64)
        kept = np.exp(of_class.sum(1, keepdims=True) / -ENGINE_WINDOW)
        self._hits = self._hits * kept + of_class @ hits
        self._trials = self._trials * kept + of_class @ trials
        self._num_new += len(slots)
        own = np.stack((hits.sum(1), trials.sum(1), np.where(trials, self._chances[classes], 0.0).sum(1)), axis=1)
        own[self._numbers[slots] != numbers] = 0.0  # counts of earlier requests of these slots
        added = np.zeros_like(self._counts)
        np.add.at(added, slots, own)
        self._counts = self._counts * np.exp(added[:, 1:2] / -REQUEST_WINDOW) + added
        if self._num_new >= ESTIMATE_SHARE * self._trials[:, 0].sum():
            self._chances, self._num_new = self._estimate(), 0
        self._odds = odds_and_bounds(self._chances, self._trials + PRIOR)
        self._ratios = self._odds_ratios()

    def age(self, num_rounds: int) -> None:
        """Do nothing, because `observe` counts rounds without drafts."""

    def expected_tokens(self, slots: Ints, numbers: Ints, speculative: Bools) -> tuple[Floats, Floats]:
        """See `Survival.expected_tokens`. Counts the reports so far, unless they are few."""
        if len(self._reports) >= COUNT_EVERY:
            self._count_reports()
        total = np.full((2, len(self._depth)), float(len(slots)))
        slots, numbers = slots[speculative], numbers[speculative]
        if len(slots) == 0:
            return total[0], total[1]
        self._clear_reused(slots, numbers)
        self._evaluated[slots] = classes = self._classes(slots)
        odds = self._odds[:, classes] * self._ratios[slots, None]
        survival = (odds / (1.0 + odds)).cumprod(2).sum(1).cumsum(1)  # [2, depth]
        total[:, 1:] += survival[:, self._depth[1:] - 1]
        return total[0], total[1]

    def _odds_ratios(self) -> Floats:
        """Return [num_slots]: the odds that a request's draft is accepted, relative to the engine's."""
        hits, trials, expected = self._counts.T
        usual = REQUEST_PRIOR * np.where(trials > 0, expected / np.maximum(trials, 1e-9), 0.5)
        hits, expected, trials = hits + usual, expected + usual, trials + REQUEST_PRIOR
        ratios: Floats = hits * (trials - expected) / np.maximum((trials - hits) * expected, 1e-9)
        return np.clip(ratios, 1.0 / MAX_RATIO, MAX_RATIO)

    def _clear_reused(self, slots: Ints, numbers: Ints) -> None:
        """Forget earlier requests of slots that have new ones."""
        changed = slots[self._numbers[slots] != numbers]
        if len(changed):
            self._counts[changed], self._ratios[changed] = 0.0, 1.0
            self._class[changed] = 0
        self._numbers[slots] = numbers

    def _estimate(self) -> Floats:
        """Return [classes, depth]: the engine's estimates."""
        found = np.empty_like(self._hits)
        chance = np.array(FIRST_CHANCES)
        for depth in range(self._max_depth):
            chance = (self._hits[:, depth] + PRIOR * chance) / (self._trials[:, depth] + PRIOR)
            chance = np.minimum(np.maximum(chance, MARGIN), 1.0 - MARGIN)
            found[:, depth] = chance
        return found
