"""How likely drafted tokens are to be accepted, by request, depth and shape: running estimates of what rounds report.

`workers.scheduling.shape_choice` asks it. Pure, one call a step, arrays over slots; knows no clock and no cost.
"""

import numpy as np
import numpy.typing as npt

from workers.config import RoundShapes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ENGINE_WINDOW = 2048.0  # rounds after which the engine's estimate has forgotten all but 1 / e
REQUEST_WINDOW = 64.0  # the same of one request's own
REQUEST_PRIOR = 24.0  # rounds that a request's own estimate weighs the engine's with
SHAPE_PRIOR = 4.0  # rounds that an estimate weighs that of another shape, or of the depth above, with
OTHERS_COUNT = 512.0  # rounds of another shape that make as sure as one of its own
UNKNOWN = 0.7  # of the first depth before any round
OPTIMISM = 1.5  # standard errors that hoped tokens are above the estimate
EDGE = 1e-3  # estimates stay that far from 0 and 1


class Survival:
    """Of a path that is accepted as far as depth k - 1, the chance that its node at depth k is accepted too.

    A round whose path of at most m drafts was accepted as far as depth a says that depths 1 to a held and, if a < m,
    that a + 1 did not; of deeper ones it says nothing. So each depth counts its own trials (Kaplan and Meier, 1958),
    and a path accepted to its end is censored there. All counts decay.

    Chains of all depths share one estimate; trees have one for each shape, which is that of the best path in such a
    tree. What has hardly run follows what has: a depth the one above it, and a shape the others: where a chain's node
    is accepted with chance q, a tree's is with 1 - (1 - q)^b, with b above 1 for wider trees.

    A request has its own counts beside the number that the engine's estimate expected of it; by the ratio of the odds
    the two differ, its chances in any shape differ from the engine's. Rounds of one shape thereby teach about another.
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
        self._hits = np.zeros((count, self._max_depth))
        self._trials = np.zeros((count, self._max_depth))
        self._chances = self._estimate()
        self._counts = np.zeros((3, self._max_depth, num_slots))  # hits, trials, and the hits that were expected
        self._users = np.full(num_slots, -1, np.int64)
        self._column = np.arange(self._max_depth)[:, None]
        self._runs, self._failed = np.zeros((2, num_slots), np.int64)
        self._decay = np.ones(num_slots)
        self._last = 0  # the family that ran last

    def family(self, shape: int) -> int:
        """Shapes of one family share their estimates as deep as both go."""
        return int(self._family[shape])

    def depth(self, shape: int) -> int:
        """Drafts that a round of a shape can accept."""
        return int(self._depth[shape])

    def record(self, slots: Ints, users: Ints, drafted: Ints, shape: int, accepted: npt.NDArray[np.int32]) -> None:
        """What rounds that verified `shape` reported. slots, users: [n] and the requests that had them. drafted: [n]
        the shapes whose trees they had. accepted: [n] drafts, -1 where there were none."""
        family = self.family(shape)
        seen = accepted >= 0
        if len(self._branching) > 1:
            seen &= self._family[drafted] == family
        num_seen = np.count_nonzero(seen)
        if num_seen == 0:
            return
        if num_seen < len(slots):
            slots, users, drafted, accepted = slots[seen], users[seen], drafted[seen], accepted[seen]
        self._take_over(slots, users)
        runs, failed = self._runs, self._failed  # of all slots: cheaper than picking rows
        runs.fill(0)
        failed.fill(0)
        runs[slots] = accepted
        failed[slots] = accepted < np.minimum(self._depth[drafted], self._depth[shape])
        hits = self._column < runs
        trials = self._column < runs + failed
        new = np.empty(self._counts.shape)
        new[0], new[1] = hits, trials
        engine_hits, engine_trials = new[:2].sum(2)
        kept = np.full(self._hits.shape, 1.0 - num_seen / ENGINE_WINDOW / 8)  # of what did not run, or hardly
        np.minimum(kept[family], 1.0 - engine_trials / ENGINE_WINDOW, out=kept[family])
        np.maximum(kept, 0.5, out=kept)
        self._hits *= kept
        self._trials *= kept
        self._hits[family] += engine_hits
        self._trials[family] += engine_trials
        weight = SHAPE_PRIOR * self._chances[family]  # what was expected knows of this step already
        chances = (self._hits[family] + weight) / (self._trials[family] + SHAPE_PRIOR)
        np.multiply(new[1], chances[:, None], out=new[2])
        decay = self._decay
        decay.fill(1.0)
        decay[slots] = 1.0 - 1.0 / REQUEST_WINDOW
        self._counts *= decay
        self._counts += new
        self._last = family

    def age(self, num_rounds: int) -> None:
        """So many rounds have run without drafts, so that what is known of drafts is older."""
        kept = max(0.5, 1.0 - num_rounds / ENGINE_WINDOW / 8)
        self._hits *= kept
        self._trials *= kept

    def expected_tokens(self, slots: Ints, users: Ints, speculative: Bools) -> tuple[Floats, Floats]:
        """[shapes], twice: tokens that one round of these requests emits, all together; those that do not speculate
        count 1 each. First as expected, then the upper end of what is likely: of what hardly ran, more may be hoped
        for. Refreshes the engine's estimates."""
        self._chances = self._estimate()
        total = np.full(len(self._depth), float(len(slots)))
        if not speculative.all():
            slots, users = slots[speculative], users[speculative]
        if len(slots) == 0:
            return total, total
        self._take_over(slots, users)
        evidence = self._trials + SHAPE_PRIOR + self._trials.max(0) / OTHERS_COUNT
        errors = np.sqrt(self._chances * (1.0 - self._chances) / evidence)
        hoped = np.minimum(self._chances + OPTIMISM * errors, 1.0 - EDGE)
        return self._tokens(total, slots, self._chances), self._tokens(total, slots, hoped)

    def _tokens(self, plain: Floats, slots: Ints, of_engine: Floats) -> Floats:
        survival = self.chances(slots, of_engine).cumprod(1).sum(2).cumsum(1)  # [families, depth]
        tokens = plain.copy()
        tokens[1:] += survival[self._family[1:], self._depth[1:] - 1]
        return tokens

    def chances(self, slots: Ints, of_engine: Floats | None = None) -> Floats:
        """[families, depth, n]: of requests that have been told of, that a node at each depth is accepted if its parent
        was. of_engine: [families, depth], the same of the engine as a whole if not as estimated."""
        of_engine = self._chances if of_engine is None else of_engine
        usual = self._chances[self._last][:, None]
        hits, trials, expected = self._counts[:, :, slots]
        weight, misses = REQUEST_PRIOR * usual, REQUEST_PRIOR * (1.0 - usual)
        ratio = (hits + weight) / (trials - hits + misses) * (trials - expected + misses) / (expected + weight)
        odds = ratio * (of_engine / (1.0 - of_engine))[:, :, None]
        chances: Floats = odds / (1.0 + odds)
        return chances

    def _take_over(self, slots: Ints, users: Ints) -> None:
        """Slots that have another request than before know nothing of it."""
        changed = self._users[slots] != users
        if changed.any():
            self._counts[:, :, slots[changed]] = 0.0
            self._users[slots] = users

    def _estimate(self) -> Floats:
        """[families, depth]: of the engine as a whole."""
        reference = self._trials.argmax(0)
        column = np.arange(self._max_depth)
        hits, trials = self._hits[reference, column].tolist(), self._trials[reference, column].tolist()
        known, chance = np.empty(self._max_depth), UNKNOWN
        for depth in range(self._max_depth):
            chance = (hits[depth] + SHAPE_PRIOR * chance) / (trials[depth] + SHAPE_PRIOR)
            known[depth] = chance
        known = np.clip(known, EDGE, 1.0 - EDGE)
        prior = 1.0 - (1.0 - known) ** (self._branching[:, None] / self._branching[reference])
        found: Floats = (self._hits + SHAPE_PRIOR * prior) / (self._trials + SHAPE_PRIOR)
        return found.clip(EDGE, 1.0 - EDGE)
