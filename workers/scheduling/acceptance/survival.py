"""Estimates of the acceptance of drafted tokens, by request, depth and shape, from what rounds report.

`workers.scheduling.shape_choice` reports rounds to it and reads it every few steps. Pure, arrays over slots; knows no
clock and no cost.
"""

import itertools
import math
import operator

import numpy as np
import numpy.typing as npt

from workers.config import RoundShapes
from workers.scheduling.acceptance.difficulty import Difficulty

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ENGINE_WINDOW = 2048.0  # rounds after which the engine's estimate has forgotten all but 1 / e
REQUEST_WINDOW = 64.0  # rounds after which a request's own estimate has forgotten all but 1 / e
REQUEST_PRIOR = 8.0  # weight of the engine's estimate in a request's own over all depths, in drafts
SPREAD = 0.5  # standard deviation of requests' log odds around the engine's, before any request has ended
SPREAD_PRIOR = 4.0  # its weight in requests,
SPREAD_INFORMATION = 5.0  # each of which had hits of this variance
SPREAD_WINDOW = 32.0  # requests after which the spread of former ones has been forgotten
MAX_SPREAD = 1.5  # limit of that standard deviation
DEPTH_PRIOR = 24.0  # weight of that in its own estimate of one depth, in rounds
MAX_RATIO = 50.0  # limit of a request's odds relative to the engine's, over all depths
SHAPE_PRIOR = 4.0  # minimum weight, in rounds, of the estimate of another shape or of the depth above
OTHERS_PRIOR = 32.0  # maximum additional weight, one for each round of the other shape
OTHERS_COUNT = 512.0  # rounds of another shape that make as sure as one of its own
UNKNOWN = 0.7  # probability of the first depth before any round
OPTIMISM = 1.5  # standard errors from the estimate to its upper end
MAX_REPORTS = 256  # steps whose reports are counted together
EDGE = 1e-3  # estimates stay that far from 0 and 1
EPSILON = 1e-9  # in windows: avoids 0 / 0


class Survival:
    """The probability that a path's node at depth k is accepted, given that the path is accepted as far as depth k - 1.

    A round whose path of at most m drafts was accepted as far as depth a reports that depths 1 to a were accepted and,
    if a < m, that a + 1 was rejected. It reports nothing about deeper nodes. So each depth counts its own trials
    (Kaplan and Meier, 1958), and a path accepted to its end is censored there. All counts decay.

    Chains of all depths share one estimate. Each tree shape has its own, for the best path of the tree. Depths and
    shapes with few rounds follow others: a depth follows the one above it; a tree follows a chain by 1 - (1 - q)^b,
    where q is the chain's probability, and b is above 1 for wider trees.

    Each request counts its own accepted nodes, and those that the engine's estimate expected. The ratio of the two odds
    scales its probabilities in every shape, so rounds of one shape teach about all. Depths that a request has hardly
    reached follow the ratio over all its depths, so that a text whose drafts fail early is not expected to accept the
    later ones. What it expects of a request follows from how hard its text is to predict (`Difficulty`), which rounds
    without drafts tell too. The upper end of an estimate counts how much requests differ, because a fresh one may be of
    another kind of text.
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
        self._counts = np.zeros((3, self._max_depth, num_slots))  # hits, trials, and the hits that were expected
        information = SPREAD_PRIOR * SPREAD_INFORMATION
        squared = information * SPREAD_INFORMATION
        # of ended requests: squared deviations of the hits, information, squared information; see `_variance`
        self._ended = np.array([information + squared * SPREAD**2, information, squared])
        self._users = np.full(num_slots, -1, np.int64)
        self._last = 0  # the family that ran last
        self._reports: list[tuple[int, Ints, Ints, Ints, npt.NDArray[np.int32]]] = []  # not counted yet
        self._difficulty = Difficulty(num_slots, count)
        self._entropies: list[tuple[int, Ints, Ints, Floats]] = []  # see `Difficulty.count`; not counted yet
        self._log_odds = np.zeros((count, num_slots))  # of `Difficulty`, at the last estimate

    def family(self, shape: int) -> int:
        """Family of a shape: shapes of one family share estimates as deep as both go."""
        return int(self._family[shape])

    def depth(self, shape: int) -> int:
        """Return the number of drafts that a round of a shape can accept."""
        return int(self._depth[shape])

    def record(self, slots: Ints, users: Ints, drafted: Ints, shape: int, accepted: npt.NDArray[np.int32]) -> None:
        """Report the rounds that verified `shape`. The arrays are kept: `expected_tokens` counts all reports together,
        because that takes as long for many as for one.

        slots, users: [n] slots, and the requests in them.
        drafted: [n] shapes that drafted their trees.
        accepted: [n] accepted drafts; -1: nothing was drafted.
        """
        self._reports.append((shape, slots, users, drafted, accepted))
        if len(self._reports) == MAX_REPORTS:
            self._count_reports()

    def record_entropies(self, slots: Ints, users: Ints, shape: int, nats: Floats) -> None:
        """Report the target's min-entropies [n] in rounds that verified `shape`; NaN where unknown. They are counted
        with later ones."""
        self._entropies.append((self.family(shape) if shape else -1, slots, users, nats))
        if len(self._entropies) == MAX_REPORTS:
            self._count_entropies()

    def _count_entropies(self) -> None:
        if self._entropies:
            self._difficulty.count(self._entropies, self._users)
            self._entropies = []

    def _count_reports(self) -> None:
        reports, self._reports = self._reports, []
        for shape, of_shape in itertools.groupby(reports, operator.itemgetter(0)):
            _, *columns = zip(*of_shape, strict=True)
            self._count(shape, *map(np.concatenate, columns))

    def _count(self, shape: int, slots: Ints, users: Ints, drafted: Ints, accepted: npt.NDArray[np.int32]) -> None:
        """Count rounds of one shape, in their order; a request may have run several."""
        family = self.family(shape)
        seen = accepted >= 0
        if len(self._branching) > 1:
            seen &= self._family[drafted] == family
        num_seen = np.count_nonzero(seen)
        if num_seen == 0:
            return
        if num_seen < len(slots):
            slots, users, drafted, accepted = slots[seen], users[seen], drafted[seen], accepted[seen]
        self._clear_reused(slots, users)
        failed = accepted < np.minimum(self._depth[drafted], self._depth[shape])
        hits, trials = self._column < accepted, self._column < accepted + failed
        engine_hits, engine_trials = hits.sum(1), trials.sum(1)
        age = np.full(self._hits.shape, num_seen / ENGINE_WINDOW / 8)  # of what did not run, or hardly
        np.maximum(age[family], engine_trials / ENGINE_WINDOW, out=age[family])
        kept, added = _kept_and_added(age)
        self._hits *= kept
        self._trials *= kept
        self._hits[family] += engine_hits * added[family]
        self._trials[family] += engine_trials * added[family]
        weight = SHAPE_PRIOR * self._chances[family]  # what was expected knows of these rounds already
        chances = (self._hits[family] + weight) / (self._trials[family] + SHAPE_PRIOR)
        num_slots = len(self._users)
        current = self._users[slots] == users  # the others' slots have another request now
        kept, added = _kept_and_added(np.bincount(slots[current], minlength=num_slots) / REQUEST_WINDOW)
        cells = self._column * num_slots + slots
        new = np.empty(self._counts.shape)
        for of_request, told in zip(new, (hits, trials), strict=False):
            counts = np.bincount(cells[told & current], minlength=of_request.size)
            np.multiply(counts.reshape(of_request.shape), added, out=of_request)
        odds = (chances / (1.0 - chances))[:, None] * np.exp(self._log_odds[family])
        np.multiply(new[1], odds / (1.0 + odds), out=new[2])
        self._counts *= kept
        self._counts += new
        self._last = family

    def age(self, num_rounds: int) -> None:
        """Count so many rounds without drafts: estimates get older by them."""
        kept = math.exp(-num_rounds / ENGINE_WINDOW / 8)
        self._hits *= kept
        self._trials *= kept

    def expected_tokens(self, slots: Ints, users: Ints, speculative: Bools) -> tuple[Floats, Floats]:
        """Return the expected tokens of one round of these requests, and their likely upper end: [shapes] each, summed
        over requests.

        A request that does not speculate counts 1. The upper end is far above the estimate for shapes that have hardly
        run. Refreshes the engine's estimates.
        """
        self._count_reports()
        self._chances = chances = self._estimate()
        total = np.full((2, len(self._depth)), float(len(slots)))
        if not speculative.all():
            slots, users = slots[speculative], users[speculative]
        if len(slots) == 0:
            return total[0], total[1]
        self._clear_reused(slots, users)
        self._count_entropies()
        self._log_odds[:, slots] = self._difficulty.log_odds(slots)
        evidence = self._trials + (SHAPE_PRIOR + self._trials.max(0) / OTHERS_COUNT)
        odds = odds_of(chances, evidence)[..., None] * np.exp(self._log_odds[:, None, slots]) * self._odds_ratios(slots)
        odds[1] *= np.exp(OPTIMISM * self._own_errors(slots) / math.sqrt(len(slots)))
        survival = (odds / (1.0 + odds)).cumprod(2).sum(3).cumsum(2)  # [2, families, depth]
        total[:, 1:] += survival[:, self._family[1:], self._depth[1:] - 1]
        return total[0], total[1]

    def _odds_ratios(self, slots: Ints) -> Floats:
        """Return [depth, n]: the odds that a request's node is accepted if its parent was, relative to those that the
        engine's estimate and the difficulty of its text give."""
        chances = self._chances[self._last][:, None]
        usual_odds = chances / (1.0 - chances) * np.exp(self._log_odds[self._last, slots])
        hits, trials, expected = self._counts[:, :, slots]
        total = trials.sum(0)
        usual = REQUEST_PRIOR * np.where(total > 0, expected.sum(0) / np.maximum(total, EPSILON), 0.5)
        over_all = _odds_ratio(hits.sum(0) + usual, total + REQUEST_PRIOR, expected.sum(0) + usual)
        odds = usual_odds * np.clip(over_all, 1.0 / MAX_RATIO, MAX_RATIO)
        own, engine = (DEPTH_PRIOR * each / (1.0 + each) for each in (odds, usual_odds))
        return _odds_ratio(hits + own, trials + DEPTH_PRIOR, expected + engine)

    def _own_errors(self, slots: Ints) -> Floats:
        """Return [n]: the standard deviation of the logarithm of each request's odds relative to the engine's, which
        are known from its own rounds and from how much requests differ."""
        _, trials, expected = self._counts[:, :, slots].sum(1)
        variance = self._variance()
        found: Floats = np.sqrt(variance / (1.0 + variance * _information(trials, expected)))
        return found

    def _variance(self) -> float:
        """Variance of requests' log odds. If a request's hits have variance I, the mean square of their deviation from
        what was expected is I + I^2 times this."""
        squares, information, squared = self._ended.tolist()
        return float(min(max((squares - information) / squared, 0.0), MAX_SPREAD**2))

    def _clear_reused(self, slots: Ints, users: Ints) -> None:
        """Forget the former requests of slots that have new ones."""
        changed = self._users[slots] != users
        if changed.any():
            self._count_entropies()
            hits, trials, expected = self._counts[:, :, slots[changed]].sum(1)
            information = _information(trials, expected)
            self._difficulty.ended(slots[changed], self._last, hits - expected, information)
            ended = np.array(((hits - expected) ** 2, information, information**2))
            self._ended = self._ended * math.exp(-np.count_nonzero(information) / SPREAD_WINDOW) + ended.sum(1)
            self._counts[:, :, slots[changed]] = self._log_odds[:, slots[changed]] = 0.0
            self._users[slots] = users

    def _estimate(self) -> Floats:
        """Return [families, depth]: the engine's estimates."""
        reference, column = self._trials.argmax(0), self._column[:, 0]
        hits_of, trials_of = (of[reference, column].tolist() for of in (self._hits, self._trials))
        chances, chance = [], UNKNOWN
        for hits, trials in zip(hits_of, trials_of, strict=True):
            chance = (hits + SHAPE_PRIOR * chance) / (trials + SHAPE_PRIOR)
            chances.append(min(max(chance, EDGE), 1.0 - EDGE))
        prior = 1.0 - (1.0 - np.array(chances)) ** (self._branching[:, None] / self._branching[reference])
        is_reference = reference == np.arange(len(self._trials))[:, None]
        weight = SHAPE_PRIOR + np.where(is_reference, 0.0, np.minimum(self._trials.max(0), OTHERS_PRIOR))
        found: Floats = (self._hits + weight * prior) / (self._trials + weight)
        return np.minimum(np.maximum(found, EDGE), 1.0 - EDGE)


def _information(trials: Floats, expected: Floats) -> Floats:
    """Return the variance of requests' hits, as they were expected: what their rounds tell of their log odds."""
    found: Floats = expected * (1.0 - expected / np.maximum(trials, EPSILON))
    return found


def _odds_ratio(hits: Floats, trials: Floats, expected: Floats) -> Floats:
    """Return the odds of `hits` among `trials` relative to those of `expected`."""
    ratio: Floats = hits * (trials - expected) / ((trials - hits) * expected)
    return ratio


def odds_of(chances: Floats, evidence: Floats) -> Floats:
    """Return [2, ...] the odds of estimated chances, and of OPTIMISM standard errors above them.

    evidence: the rounds that each estimate rests on.
    """
    errors = np.sqrt(chances * (1.0 - chances) / evidence)
    both = np.stack((chances, np.minimum(chances + OPTIMISM * errors, 1.0 - EDGE)))
    odds: Floats = both / (1.0 - both)
    return odds


def _kept_and_added(age: Floats) -> tuple[Floats, Floats]:
    """Return the mean weight that old counts keep, and that new ones get, while the counts decay by `age` windows. New
    counts arrive one after the other."""
    kept = np.exp(-age)
    return kept, (1.0 - kept + EPSILON) / (age + EPSILON)
