"""Estimates the acceptance of drafted tokens by request, depth and tree shape.

`aerie.workers.scheduling.shape_choice` reports each round's accepted drafts and reads the estimates every few steps.
Pure; arrays are indexed by slot. Knows neither time nor costs.
"""

import itertools
import math
import operator

import numpy as np
import numpy.typing as npt

from aerie.workers.config import RoundShapes
from aerie.workers.scheduling.acceptance.difficulty import Difficulty
from aerie.workers.scheduling.acceptance.request_odds import RequestOdds, kept_and_added

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ENGINE_WINDOW = 2048.0  # rounds after which the weight in the engine's estimate is 1 / e
SHAPE_PRIOR = 4.0  # minimum weight, in rounds, of the estimate implied by another shape or the depth above
OTHERS_PRIOR = 32.0  # maximum weight that the other shape's rounds add (one per round)
OTHERS_COUNT = 512.0  # rounds of another shape that reduce the error as much as one round of this shape
FIRST_CHANCE = 0.7  # initial probability of depth 1
UPPER_ERRORS = 1.5  # standard errors between an estimate and its upper confidence bound
MAX_REPORTS = 256  # steps whose reports are counted together
MARGIN = 1e-3  # estimates stay this far from 0 and 1


class Survival:
    """Estimates the probability that the draft at depth k is accepted, given that depths 1 to k - 1 were.

    A round that accepted a of at most m drafts is a success at depths 1 to a and, if a < m, a failure at depth a + 1.
    It is not a trial of deeper drafts (Kaplan and Meier, 1958). All counts decay.

    The engine has one estimate for chains of all depths, and one for the best path of each tree shape. With few rounds,
    a depth's estimate follows that of the depth above, and a tree's follows the chain's: 1 - (1 - q)^b for a chain's q,
    where b is 1 for chains and grows with the tree's width.

    A request's estimate is the engine's, with two factors on the odds, which apply to every shape:
    - the difficulty of its text, also from rounds without drafts (`Difficulty`);
    - accepted drafts relative to the expected number, of recent requests and of its own (`RequestOdds`).

    The upper confidence bound includes the spread of requests, because a new one may have another kind of text.
    """

    def __init__(self, shapes: RoundShapes, num_slots: int) -> None:
        depths = [shape.depth for shape in shapes.shapes]
        self._depth = np.array(depths, np.int64)
        families: dict[int, int] = {}
        self._family = np.zeros(len(shapes), np.int64)
        for index, shape in enumerate(shapes.shapes[1:], 1):
            key = 0 if shape.is_chain else index
            self._family[index] = families.setdefault(key, len(families))
        count, self._max_depth = max(1, len(families)), max(1, *depths)
        self._branching = np.ones(count)
        for index, shape in enumerate(shapes.shapes[1:], 1):
            self._branching[self._family[index]] += np.log2(shape.width / shape.max_new_tokens) / 4
        self._column = np.arange(self._max_depth)[:, None]
        self._hits = np.zeros((count, self._max_depth))
        self._trials = np.zeros((count, self._max_depth))
        self._chances = self._estimate()
        self._requests = RequestOdds(self._max_depth, num_slots)
        self._numbers = np.full(num_slots, -1, np.int64)  # numbers of the requests that have the slots
        self._last = 0  # the last family that ran
        self._reports: list[tuple[int, Ints, Ints, Ints, npt.NDArray[np.int32]]] = []  # not counted yet
        self._difficulty = Difficulty(num_slots, count)
        self._entropies: list[tuple[int, Ints, Ints, Floats]] = []  # see `Difficulty.count`; not counted yet
        self._log_odds = np.zeros((count, num_slots))  # `Difficulty.log_odds` at the last estimate

    def family(self, shape: int) -> int:
        """Return the index of a shape's family, which shares one estimate: all chains, or one tree shape."""
        return int(self._family[shape])

    def depth(self, shape: int) -> int:
        """Return the number of drafts that a round of a shape can accept."""
        return int(self._depth[shape])

    def record(self, slots: Ints, numbers: Ints, drafted: Ints, shape: int, accepted: npt.NDArray[np.int32]) -> None:
        """Report a step's rounds, which verified `shape`. Stores the arrays; `expected_tokens` counts all reports at
        once, which takes no longer than counting one.

        slots: [n].
        numbers: [n] numbers of the requests in these slots.
        drafted: [n] shapes in which their trees were drafted.
        accepted: [n] accepted drafts; -1 if nothing was drafted.
        """
        self._reports.append((shape, slots, numbers, drafted, accepted))
        if len(self._reports) == MAX_REPORTS:
            self._count_reports()

    def record_entropies(self, slots: Ints, numbers: Ints, shape: int, nats: Floats) -> None:
        """Report the target's min-entropies in a step's rounds, which verified `shape`. Stores the arrays, as `record`
        does.

        slots, numbers: as in `record`.
        nats: [n] min-entropies in nats; NaN if unknown.
        """
        self._entropies.append((self.family(shape) if shape else -1, slots, numbers, nats))
        if len(self._entropies) == MAX_REPORTS:
            self._count_entropies()

    def _count_entropies(self) -> None:
        if self._entropies:
            self._difficulty.count(self._entropies, self._numbers)
            plain = [slots[self._numbers[slots] == of] for family, slots, of, _ in self._entropies if family < 0]
            if plain:
                self._requests.count_plain(np.bincount(np.concatenate(plain), minlength=len(self._numbers)))
            self._entropies = []

    def _count_reports(self) -> None:
        reports, self._reports = self._reports, []
        for shape, of_shape in itertools.groupby(reports, operator.itemgetter(0)):
            _, *columns = zip(*of_shape, strict=True)
            self._count(shape, *map(np.concatenate, columns))

    def _count(self, shape: int, slots: Ints, numbers: Ints, drafted: Ints, accepted: npt.NDArray[np.int32]) -> None:
        """Count rounds that verified one shape, in order. A request may occur more than once."""
        family = self.family(shape)
        seen = accepted >= 0
        if len(self._branching) > 1:
            seen &= self._family[drafted] == family
        num_seen = np.count_nonzero(seen)
        if num_seen == 0:
            return
        if num_seen < len(slots):
            slots, numbers, drafted, accepted = slots[seen], numbers[seen], drafted[seen], accepted[seen]
        self._clear_reused(slots, numbers)
        failed = accepted < np.minimum(self._depth[drafted], self._depth[shape])
        hits, trials = self._column < accepted, self._column < accepted + failed
        engine_hits, engine_trials = hits.sum(1), trials.sum(1)
        # minimum: counts of other shapes and depths decay at an eighth of the pace
        age = np.full(self._hits.shape, num_seen / ENGINE_WINDOW / 8)
        np.maximum(age[family], engine_trials / ENGINE_WINDOW, out=age[family])
        kept, added = kept_and_added(age)
        self._hits *= kept
        self._trials *= kept
        self._hits[family] += engine_hits * added[family]
        self._trials[family] += engine_trials * added[family]
        # the expected hits come from an estimate that includes these rounds
        weight = SHAPE_PRIOR * self._chances[family]
        chances = (self._hits[family] + weight) / (self._trials[family] + SHAPE_PRIOR)
        odds = (chances / (1.0 - chances))[:, None] * np.exp(self._log_odds[family])
        current = self._numbers[slots] == numbers  # False if another request has the slot now
        variance = self._requests.count(slots, hits, trials, current, odds)
        self._difficulty.weigh(family, variance)
        self._last = family

    def age(self, num_rounds: int) -> None:
        """Decay the counts by `num_rounds` rounds without drafts."""
        kept = math.exp(-num_rounds / ENGINE_WINDOW / 8)
        self._hits *= kept
        self._trials *= kept

    def expected_tokens(self, slots: Ints, numbers: Ints, speculative: Bools) -> tuple[Floats, Floats]:
        """Return the expected tokens of one round of these requests by shape, and their upper confidence bounds.

        slots: [n].
        numbers: [n] numbers of the requests in these slots.
        speculative: [n] whether a request uses drafts; if not, 1 token is expected.

        Both results are [shapes], summed over requests. The bound is far above the estimate for a shape that has hardly
        run. Counts the reports so far.
        """
        self._count_reports()
        self._chances = chances = self._estimate()
        total = np.full((2, len(self._depth)), float(len(slots)))
        if not speculative.all():
            slots, numbers = slots[speculative], numbers[speculative]
        if len(slots) == 0:
            return total[0], total[1]
        self._clear_reused(slots, numbers)
        self._count_entropies()
        self._log_odds[:, slots] = self._difficulty.log_odds(slots)
        evidence = self._trials + (SHAPE_PRIOR + self._trials.max(0) / OTHERS_COUNT)
        odds = odds_and_bounds(chances, evidence)[..., None] * np.exp(self._log_odds[:, None, slots])
        self._requests.update()
        of_last = chances[self._last, :, None]
        of_last = of_last / (1.0 - of_last) * np.exp(self._log_odds[self._last, slots])
        odds *= self._requests.factors(slots, of_last)
        odds[1] *= np.exp(UPPER_ERRORS * self._requests.errors(slots) / math.sqrt(len(slots)))
        survival = (odds / (1.0 + odds)).cumprod(2).sum(3).cumsum(2)  # [2, families, depth]
        total[:, 1:] += survival[:, self._family[1:], self._depth[1:] - 1]
        return total[0], total[1]

    def tokens_of_new(self) -> list[float]:
        """Return the expected tokens of one round of a request with drafts that is not known yet, by shape."""
        survival = self._estimate().cumprod(1).cumsum(1)
        return [1.0] + [1.0 + float(survival[self._family[i], self._depth[i] - 1]) for i in range(1, len(self._depth))]

    def _clear_reused(self, slots: Ints, numbers: Ints) -> None:
        """For slots that have a new request, learn from the earlier one and forget its counts."""
        changed = self._numbers[slots] != numbers
        if changed.any():
            self._count_entropies()
            former = slots[changed]
            self._difficulty.ended(former, self._last, *self._requests.ended(former))
            self._log_odds[:, former] = 0.0
            self._numbers[slots] = numbers

    def _estimate(self) -> Floats:
        """Return [families, depth]: the engine's estimates."""
        reference, column = self._trials.argmax(0), self._column[:, 0]
        hits_of, trials_of = (of[reference, column].tolist() for of in (self._hits, self._trials))
        chances, chance = [], FIRST_CHANCE
        for hits, trials in zip(hits_of, trials_of, strict=True):
            chance = (hits + SHAPE_PRIOR * chance) / (trials + SHAPE_PRIOR)
            chances.append(min(max(chance, MARGIN), 1.0 - MARGIN))
        prior = 1.0 - (1.0 - np.array(chances)) ** (self._branching[:, None] / self._branching[reference])
        is_reference = reference == np.arange(len(self._trials))[:, None]
        weight = SHAPE_PRIOR + np.where(is_reference, 0.0, np.minimum(self._trials.max(0), OTHERS_PRIOR))
        found: Floats = (self._hits + weight * prior) / (self._trials + weight)
        return np.minimum(np.maximum(found, MARGIN), 1.0 - MARGIN)


def odds_and_bounds(chances: Floats, evidence: Floats) -> Floats:
    """Return [2, ...]: the odds of estimated probabilities, and of their upper confidence bounds.

    chances: [...] the estimates.
    evidence: [...] number of rounds that each estimate is based on.
    """
    errors = np.sqrt(chances * (1.0 - chances) / evidence)
    both = np.stack((chances, np.minimum(chances + UPPER_ERRORS * errors, 1.0 - MARGIN)))
    odds: Floats = both / (1.0 - both)
    return odds
