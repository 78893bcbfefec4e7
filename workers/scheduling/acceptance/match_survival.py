"""Estimates the acceptance of drafts that are copied from the request's own text, by length of the match.

As `survival`, with two differences. Estimates differ by the length of the newest match that the host knows, which is
two steps old; no match is a class of its own. Rounds without drafts count, too, because ranks propose tokens all the
same and report how many were right.
"""

import numpy as np
import numpy.typing as npt

from workers.config import RoundShapes
from workers.scheduling.acceptance.survival import ENGINE_WINDOW, MARGIN, Bools, Floats, Ints, odds_and_bounds

CLASS_STARTS = (1, 3, 6, 12)  # lengths of matches, in tokens, at which a class begins; class 0: no match
FIRST_CHANCES = (0.05, 0.3, 0.5, 0.65, 0.8)  # probability of a class's first draft before any round
PRIOR = 4.0  # weight, in rounds, of that probability, or of the estimate of the draft before, in an estimate
REQUEST_WINDOW = 64.0  # drafts after which a request's own estimate has forgotten all but 1 / e
REQUEST_PRIOR = 8.0  # weight, in drafts, of the engine's estimate in a request's own
MAX_RATIO = 20.0  # bound on a request's odds relative to the engine's, either way


class MatchSurvival:
    """`Survival` for an engine with `RoundShapes.model_free`.

    A probability is that of a draft whose predecessors were accepted. A request's odds are the engine's times one ratio
    for all classes and depths, from its own counts.
    """

    def __init__(self, shapes: RoundShapes, num_slots: int) -> None:
        self._depth = np.array([shape.depth for shape in shapes.shapes], np.int64)
        self._max_depth = max(1, *self._depth.tolist())
        self._column = np.arange(self._max_depth)
        self._hits = np.zeros((len(FIRST_CHANCES), self._max_depth))
        self._trials = np.zeros_like(self._hits)
        self._chances = self._estimate()
        self._counts = np.zeros((num_slots, 3))  # hits, trials, expected hits
        self._numbers = np.full(num_slots, -1, np.int64)
        self._class = np.zeros(num_slots, np.int64)  # of the newest known match
        self._evaluated = np.zeros(num_slots, np.int64)  # the class at the last `expected_tokens`

    def family(self, shape: int) -> int:
        """All chains share their estimates."""
        return 0

    def depth(self, shape: int) -> int:
        """Return the number of drafts that a round of a shape can accept."""
        return int(self._depth[shape])

    def classes(self, slots: Ints, numbers: Ints) -> Ints:
        """Return [n]: the class of each request's newest known match, for the step that is planned now. numbers: [n]
        numbers of the requests in `slots`."""
        self._clear_reused(slots, numbers)
        known: Ints = self._class[slots]
        return known

    def classes_changed(self, slots: Ints) -> bool:
        """Whether more than a quarter of these requests changed their class since the last `expected_tokens`."""
        return 4 * int(np.count_nonzero(self._class[slots] != self._evaluated[slots])) > len(slots)

    def observe(
        self, slots: Ints, numbers: Ints, classes: Ints, counts: npt.NDArray[np.int32], matches: npt.NDArray[np.int32]
    ) -> None:
        """Learn from rounds of requests that speculate and have not ended.

        slots, numbers: [n] slots, and the numbers of the requests in them.
        classes: [n] `classes` when the step was planned; -1 where nothing was proposed, after a prompt's end.
        counts: [n] emitted tokens, at least 1.
        matches: [n, 3] as in `StepResult`.
        """
        self._clear_reused(slots, numbers)
        self._class[slots] = np.searchsorted(CLASS_STARTS, matches[:, 1], side="right")
        ran = classes >= 0
        slots, classes = slots[ran], classes[ran]
        num_correct = np.maximum(matches[ran, :1], 0)
        tested = np.minimum(counts[ran, None], self._max_depth)
        hits = self._column < num_correct
        trials = self._column < num_correct + (num_correct < tested)
        of_class = (np.arange(len(FIRST_CHANCES))[:, None] == classes).astype(np.float64)
        expected = np.where(trials, self._chances[classes], 0.0).sum(1)
        age = of_class.sum(1, keepdims=True) / ENGINE_WINDOW
        kept = np.exp(-age)
        self._hits = self._hits * kept + of_class @ hits
        self._trials = self._trials * kept + of_class @ trials
        own = np.stack((hits.sum(1), trials.sum(1), expected), axis=1)
        self._counts[slots] = self._counts[slots] * np.exp(-own[:, 1:2] / REQUEST_WINDOW) + own

    def age(self, num_rounds: int) -> None:
        """Do nothing: `observe` gets rounds without drafts, too."""

    def expected_tokens(self, slots: Ints, numbers: Ints, speculative: Bools) -> tuple[Floats, Floats]:
        """See `Survival.expected_tokens`."""
        self._chances = chances = self._estimate()
        total = np.full((2, len(self._depth)), float(len(slots)))
        slots, numbers = slots[speculative], numbers[speculative]
        if len(slots) == 0:
            return total[0], total[1]
        self._clear_reused(slots, numbers)
        self._evaluated[slots] = self._class[slots]
        odds = odds_and_bounds(chances, self._trials + PRIOR)[:, self._class[slots]] * self._odds_ratios(slots)[:, None]
        survival = (odds / (1.0 + odds)).cumprod(2).sum(1).cumsum(1)  # [2, depth]
        total[:, 1:] += survival[:, self._depth[1:] - 1]
        return total[0], total[1]

    def _odds_ratios(self, slots: Ints) -> Floats:
        """Return [n]: the odds that a request's draft is accepted, relative to the engine's."""
        hits, trials, expected = self._counts[slots].T
        usual = REQUEST_PRIOR * np.where(trials > 0, expected / np.maximum(trials, 1e-9), 0.5)
        hits, expected, trials = hits + usual, expected + usual, trials + REQUEST_PRIOR
        ratios: Floats = hits * (trials - expected) / np.maximum((trials - hits) * expected, 1e-9)
        return np.clip(ratios, 1.0 / MAX_RATIO, MAX_RATIO)

    def _clear_reused(self, slots: Ints, numbers: Ints) -> None:
        """Forget the former requests of slots that have new ones."""
        changed = slots[self._numbers[slots] != numbers]
        if len(changed):
            self._counts[changed] = 0.0
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
