"""Estimates the accepted drafts of a round of each tree shape, for any requests, with a standard error.

`step_results` reports rounds, and `shape_choice` reads the estimates every few steps. Pure; arrays are indexed by slot.
Knows neither time nor costs.
"""

import math

import numpy as np
import numpy.typing as npt

from aerie.workers.config import RoundShapes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

WINDOW = 2048.0  # rounds after which the weight in the engine's counts is 1 / e
# The same for a request's own counts and for those of recent requests, and in ended requests for v.
REQUEST_WINDOW = 64.0
# The same for a request's mean min-entropy, which is added to as many rounds of recent requests; and for its own counts
# in rounds without drafts, after which it is expected to be past its hard words.
NATS_WINDOW = 16.0
# Weight of what an estimate is shrunk to. In a cell: rounds of the depth above, and at most as many of other rows. In
# an offset: drafts, accepted as expected, of recent requests; of a request, over v. In v: requests of `VARIANCE`.
PRIOR = 8.0
FIRST_CHANCE = 0.7  # initial probability of the first draft; of copied ones, whatever their match
VARIANCE = 0.25  # v, the variance of requests' log odds, before any request has ended, and its minimum in offsets
SLOPE = 1.8  # log odds lost per nat of the target's min-entropy; 2.0 to 2.4 for whole answers of the embedded pair
UPPER_ERRORS = 1.5  # standard errors between an estimate and its upper confidence bound
MARGIN = 1e-3  # probabilities stay this far from 0 and 1
MAX_REPORTS = 64  # steps whose reports are counted together

MATCH_LENGTHS = (1, 3, 6, 12)  # tokens at which classes of matches begin; class 0: no match
NUM_LENGTHS = len(MATCH_LENGTHS) + 1


class Acceptance:
    """Counts accepted drafts, and predicts those of requests' next rounds.

    A round that accepted a of at most m drafts is a success at depths 1 to a and, if a < m, a failure at depth a + 1.
    It says nothing of deeper drafts (Kaplan and Meier, 1958). These trials are counted, with exponential forgetting, in
    rows of one cell per depth:
    - with a draft model, one row for all chains and one for each tree shape;
    - with copied drafts, one row for each class of the newest match that the host knows (two steps old): its length,
      and whether the round in flight uses it up. Ranks report how many copied tokens were right after every round.

    A cell is shrunk to the depth above and to the other rows: a tree of breadth b, which grows with the logarithm of
    its width, is expected to accept 1 - (1 - q)^b where a chain accepts q. So a shape that never ran is interpolated
    from those that did.

    A request's log odds are the cell's plus an offset, the same for all cells. It is the sum of the offset of recent
    requests, of what the target's min-entropy in the request's text tells (also in rounds without drafts), and of the
    request's own accepted drafts, relative to the expected number. What is expected of counted trials is computed anew
    with every estimate; with estimates of the time when they were counted, an offset would keep what the cells have
    learned since, and count it twice.

    A row's counts are compared with the offsets in the rounds that they are from. Else a chain that ran on a hard text
    alone would promise as little on an easy one, where a tree runs whose own counts have learned that it is easy.
    """

    def __init__(self, shapes: RoundShapes, num_slots: int) -> None:
        self._is_copied = shapes.model_free
        self._depth = np.array([shape.depth for shape in shapes.shapes], np.int64)
        self._max_depth = max(1, int(self._depth.max()))
        self._row, breadth = np.zeros(len(shapes), np.int64), {0: 1.0}
        for index, shape in enumerate(shapes.shapes):
            if not (index == 0 or shape.is_chain or shapes.model_free):
                self._row[index] = len(breadth)
                breadth[len(breadth)] = 1.0 + math.log2(shape.width / shape.max_new_tokens) / 4
        exponents = np.array(list(breadth.values()))
        self._exponents = (exponents / exponents[:, None])[:, :, None]  # [other row, row, 1]
        self._borrowed = np.exp2(-16.0 * np.abs(np.log2(self._exponents)))  # weight of another row's round
        self._borrowed[np.diag_indices(len(exponents))] = 0.0
        # copied drafts have a row for each class of matches, without drafts in flight and with them
        self._first = np.full(2 * NUM_LENGTHS if self._is_copied else len(exponents), FIRST_CHANCE)
        self._hits, self._trials = np.zeros((2, len(self._first), self._max_depth))
        self._num_slots = num_slots  # column of rounds of earlier requests, in arrays of num_slots + 1
        self._numbers = np.full(num_slots + 1, -1, np.int64)  # numbers of the requests in the slots
        # decayed hits, and trials by cell: of the requests in the slots, and of all recent ones
        self._own_hits, self._own_trials = np.zeros(num_slots + 1), np.zeros((*self._hits.shape, num_slots + 1))
        self._recent_hits, self._recent_trials = 0.0, np.zeros_like(self._hits)
        # decayed nats and rounds: of requests, of all, and of those that each row's counts are from
        self._own_nats = np.zeros((2, num_slots + 1))
        self._recent_nats, self._row_nats = np.zeros(2), np.zeros((2, len(self._first)))
        self._row_offsets = np.zeros((2, len(self._first)))  # the same of accepted drafts' offsets
        self._recent_offset = 0.0
        self._offset = np.zeros((len(self._first), num_slots + 1))  # without the request's own accepted drafts
        information, squared = PRIOR**2, PRIOR**3  # of `PRIOR` requests, whose hits have a variance of `PRIOR` each
        # decayed sums over ended requests: (hits - expected)^2, information, information^2
        self._ended = np.array([information + squared * VARIANCE, information, squared])
        # shapes, slots, numbers, drafted, accepted, possible, nats
        self._reports: list[tuple[int, Ints, Ints, Ints, Int32s, Int32s, Floats]] = []
        self._class = np.zeros(num_slots, np.int64)  # class of the newest known match
        self._in_flight = np.zeros(num_slots, np.int64)  # NUM_LENGTHS if the round in flight verifies drafts, else 0
        self._evaluated = np.zeros(num_slots, np.int64)  # the class at the last `expected_tokens`
        self._estimate()

    def informs(self, shape: int, other: int) -> bool:
        """Return whether rounds of a shape measure the acceptance of another one: of itself, and of a shape of the same
        row that is not deeper."""
        same_row = shape > 0 and self._row[shape] == self._row[other]
        return other == shape or bool(same_row and self._depth[other] <= self._depth[shape])

    def record(
        self, shape: int, slots: Ints, numbers: Ints, drafted: Ints, accepted: Int32s, nats: Floats | None = None
    ) -> None:
        """Report a step's rounds, which verified `shape`. Stores the arrays; they are counted later, together.

        slots: [n].
        numbers: [n] numbers of the requests in these slots.
        drafted: [n] shapes in which their trees were drafted.
        accepted: [n] accepted drafts; -1 if nothing was drafted.
        nats: [n] min-entropies of the target, NaN if unknown.
        """
        nats = np.full(len(slots), np.nan) if nats is None else nats
        self._reports.append((shape, slots, numbers, drafted, accepted, accepted, nats))
        if len(self._reports) == MAX_REPORTS:
            self._count()

    def record_matches(self, slots: Ints, numbers: Ints, classes: Ints, counts: Int32s, matches: Int32s) -> None:
        """Report rounds of requests that copy drafts and have not ended.

        classes: [n] `classes` when the step was planned; -1 if nothing was proposed (after a prompt's end).
        counts: [n] emitted tokens, at least 1.
        matches: [n, 3] as in `StepResult`.
        """
        self._forget_earlier(slots, numbers)
        self._class[slots] = np.searchsorted(MATCH_LENGTHS, matches[:, 1], side="right")
        correct = np.where(classes < 0, -1, np.maximum(matches[:, 0], 0))
        nats = np.full(len(slots), np.nan)
        self._reports.append((1, slots, numbers, classes, correct, np.minimum(counts, self._max_depth), nats))
        if len(self._reports) == MAX_REPORTS:
            self._count()

    def classes(self, slots: Ints, numbers: Ints) -> Ints:
        """Return [n]: the class of each request's match in the step being planned."""
        self._forget_earlier(slots, numbers)
        classes: Ints = self._class[slots] + self._in_flight[slots]
        return classes

    def set_in_flight(self, slots: Ints, verifies: Bools) -> None:
        """Set which requests have a round in flight that verifies drafts, [n]. Called before a step is planned."""
        self._in_flight[slots] = np.where(verifies, NUM_LENGTHS, 0)

    def classes_changed(self, slots: Ints) -> bool:
        """Return whether more than a quarter of these requests changed their class since the last `expected_tokens`."""
        changed = self._class[slots] + self._in_flight[slots] != self._evaluated[slots]
        return 4 * int(np.count_nonzero(changed)) > len(slots)

    def expected_tokens(self, slots: Ints, numbers: Ints, speculative: Bools) -> tuple[Floats, Floats]:
        """Return the expected tokens of one round of these requests by shape, and their upper confidence bounds.

        slots: [n].
        numbers: [n] numbers of the requests in these slots.
        speculative: [n] whether a request uses drafts; if not, 1 token is expected.

        Both results are [shapes], summed over requests. Counts the reports so far.
        """
        self._count()
        total = np.full((2, len(self._depth)), float(len(slots)))
        slots, numbers = slots[speculative], numbers[speculative]
        if len(slots) == 0:
            return total[0], total[1]
        self._forget_earlier(slots, numbers)
        self._update_offsets(slots)
        own, variance = self._own_offsets(slots)
        variance *= not self._is_copied  # all rounds tell of copied drafts, so that a probe shows nothing of a request
        offsets = np.stack((own, own + UPPER_ERRORS * np.sqrt(variance / len(slots))))[:, None]
        offsets = (offsets + self._offset[:, slots])[:, :, None]  # [2, rows, 1, n]
        cells = np.stack((self._logits, self._upper))[..., None]  # [2, rows, depth, 1]
        if self._is_copied:
            self._evaluated[slots] = classes = self.classes(slots, numbers)
            cells, offsets = cells[:, classes].swapaxes(1, 3), offsets[:, :1]  # [2, 1, depth, n]
        chances = _chance(cells + offsets)
        survival = chances.cumprod(2).sum(3).cumsum(2)  # [2, rows or 1, depth]
        total[:, 1:] += survival[:, self._row[1:], self._depth[1:] - 1]
        return total[0], total[1]

    def tokens_of_new(self) -> list[float]:
        """Return the expected tokens of one round of a request with drafts that is not known yet, by shape."""
        survival = _chance(self._logits).cumprod(1).cumsum(1)
        return [1.0] + [1.0 + float(survival[self._row[i], self._depth[i] - 1]) for i in range(1, len(self._depth))]

    def _forget_earlier(self, slots: Ints, numbers: Ints) -> None:
        """Learn how much requests differ from earlier requests of these slots, and forget these."""
        changed = slots[self._numbers[slots] != numbers]
        if len(changed):
            hits, trials, expected = self._own_sums(np.unique(changed))
            information = expected * (1.0 - expected / np.maximum(trials, MARGIN))
            ended = np.array(((hits - expected) ** 2, information, information**2)).sum(1)
            self._ended = self._ended * math.exp(-np.count_nonzero(information) / REQUEST_WINDOW) + ended
            self._own_hits[changed] = self._own_trials[:, :, changed] = 0.0
            self._own_nats[:, changed] = self._offset[:, changed] = 0.0
            self._class[changed] = 0
            self._numbers[slots] = numbers

    def _count(self) -> None:
        """Count all reports so far."""
        if not self._reports:
            return
        shapes, *columns = zip(*self._reports, strict=True)
        self._reports = []
        slots, numbers, drafted, accepted, possible, nats = map(np.concatenate, columns)
        is_known = (accepted >= 0) | (nats >= 0.0)
        self._forget_earlier(slots[is_known], numbers[is_known])
        slots = np.where(self._numbers[slots] == numbers, slots, self._num_slots)  # last column: ended requests
        ran, rows = accepted >= 0, drafted
        if not self._is_copied:
            shape = np.repeat(shapes, [len(step_slots) for step_slots in columns[0]])
            rows, possible = self._row[shape], np.minimum(self._depth[drafted], self._depth[shape])
            self._count_nats(slots, np.where(ran, rows, -1), nats)
            ran &= self._row[drafted] == rows  # a tree drafted for another row of cells says nothing of this one
        num_drafted, num_plain = (np.bincount(slots[which], minlength=self._num_slots + 1) for which in (ran, ~ran))
        own_decay = np.exp(-num_drafted / REQUEST_WINDOW - num_plain / NATS_WINDOW)
        recent_decay = math.exp(-len(slots) / REQUEST_WINDOW)
        self._own_hits *= own_decay
        self._own_trials *= own_decay
        self._recent_hits *= recent_decay
        self._recent_trials *= recent_decay
        rounds_of_row = np.bincount(rows[ran], minlength=len(self._hits))
        # other rows are forgotten more slowly
        decay = np.exp(-np.maximum(rounds_of_row, len(slots) / 8)[:, None] / WINDOW)
        self._hits *= decay
        self._trials *= decay
        if not ran.any():
            self._estimate()
            return
        # count rounds by (row, request, accepted drafts, whether the next draft was refused) ...
        present = np.flatnonzero(num_drafted)
        index = np.empty(self._num_slots + 1, np.int64)
        index[present] = np.arange(len(present))
        size = len(self._hits), len(present), self._max_depth + 1, 2
        cells = rows[ran], index[slots[ran]], accepted[ran], (accepted < possible)[ran].astype(np.int64)
        tests = np.bincount(np.ravel_multi_index(cells, size, mode="clip"), minlength=math.prod(size)).reshape(size)
        # ... so depth d has a hit in every round that accepted at least d, and a miss in those that stopped before it
        hits = tests.sum(3)[:, :, :0:-1].cumsum(2)[:, :, ::-1]  # [rows, present, depth]
        trials = hits + tests[:, :, :-1, 1]
        self._own_hits[present] += hits.sum((0, 2))
        self._own_trials[:, :, present] += trials.swapaxes(1, 2)
        self._recent_hits += hits.sum()
        self._recent_trials += trials.sum(1)
        self._count_offsets(slots[ran], rows[ran], present)
        self._hits += hits.sum(1)
        self._trials += trials.sum(1)
        self._estimate()

    def _count_nats(self, slots: Ints, rows: Ints, nats: Floats) -> None:
        """Add rounds to the means of the min-entropy. rows: [n] rows that count the rounds, -1 without drafts."""
        known = nats >= 0.0  # False for NaN
        slots, rows, nats = slots[known], rows[known], nats[known]
        self._recent_nats *= math.exp(-len(nats) / REQUEST_WINDOW)
        self._recent_nats += nats.sum(), len(nats)
        for sums, index, window in ((self._own_nats, slots, NATS_WINDOW), (self._row_nats, rows, WINDOW)):
            counted, size = index >= 0, sums.shape[1]
            rounds = np.bincount(index[counted], minlength=size)
            sums *= np.exp(-rounds / window)
            sums += np.bincount(index[counted], nats[counted], size), rounds

    def _count_offsets(self, slots: Ints, rows: Ints, present: Ints) -> None:
        """Add rounds to the means of the offsets. Called before the cells learn from these rounds, so that a surprise
        counts as the text's in part. present: [m] the slots without repetitions."""
        self._update_offsets(present)
        offsets = np.zeros(self._num_slots + 1)
        offsets[present] = self._recent_offset + self._own_offsets(present)[0]
        size = len(self._hits)
        rounds = np.bincount(rows, minlength=size)
        self._row_offsets *= np.exp(-rounds / WINDOW)
        self._row_offsets += np.bincount(rows, offsets[slots], size), rounds

    def _estimate(self) -> None:
        """Estimate every cell's log odds, and their upper confidence bounds."""
        rates = (self._hits + MARGIN) / (self._trials + 2 * MARGIN)
        weights = self._borrowed * self._trials[:, None]  # [other row, row, depth]
        borrowed = weights.sum(0)
        share = np.minimum(1.0, PRIOR / np.maximum(borrowed, 1.0))
        others = (weights * (1.0 - (1.0 - rates[:, None]) ** self._exponents)).sum(0)
        hits, trials = self._hits + share * others, self._trials + share * borrowed
        chances, chance = np.empty_like(hits), self._first
        for depth in range(self._max_depth):
            chance = (hits[:, depth] + PRIOR * chance) / (trials[:, depth] + PRIOR)
            chances[:, depth] = chance
        chances = np.clip(chances, MARGIN, 1.0 - MARGIN)
        upper = chances + UPPER_ERRORS * np.sqrt(chances * (1.0 - chances) / (self._trials + PRIOR))
        self._logits, self._upper = _logits_of(chances), _logits_of(np.minimum(upper, 1.0 - MARGIN))

    def _update_offsets(self, slots: Ints) -> None:
        """Estimate the offsets of recent requests, and those by min-entropy."""
        mean_nats = _mean(self._row_nats if self._row_nats[1].any() else self._recent_nats)
        mean_offset = _mean(self._row_offsets)
        recent_nats = float(_shrunk(self._recent_nats, mean_nats))
        nats = _shrunk(self._own_nats[:, slots], recent_nats)
        of_rows = SLOPE * _shrunk(self._row_nats, mean_nats) + mean_offset - _shrunk(self._row_offsets, mean_offset)
        trials, logits = self._recent_trials, self._logits + (of_rows - SLOPE * recent_nats)[:, None]
        sums = np.array((self._recent_hits, trials.sum(), (trials * _chance(logits)).sum()))
        self._recent_offset = float(_offset(sums, PRIOR)[0])
        self._offset[:, slots] = self._recent_offset + of_rows[:, None] - SLOPE * nats

    def _own_sums(self, slots: Ints) -> Floats:
        """Return [3, n]: hits, trials and expected hits of the requests in these slots."""
        trials = self._own_trials[:, :, slots]
        expected = trials * _chance(self._logits[:, :, None] + self._offset[:, None, slots])
        sums: Floats = np.stack((self._own_hits[slots], trials.sum((0, 1)), expected.sum((0, 1))))
        return sums

    def _own_offsets(self, slots: Ints) -> tuple[Floats, Floats]:
        """Return, [n] each, the offsets by requests' own accepted drafts, and the variance of their errors.

        If the hits of an ended request have variance I and requests' log odds have variance v, the mean of
        (hits - expected)^2 is I + v * I^2.
        """
        squares, information, squared = self._ended.tolist()
        variance = max((squares - information) / squared, MARGIN)
        offsets, information = _offset(self._own_sums(slots), PRIOR / max(variance, VARIANCE))
        return offsets, 1.0 / (1.0 / variance + information)


def _offset(sums: Floats, prior: float) -> tuple[Floats, Floats]:
    """Return log odds of the hits minus log odds of the expected hits, and the Fisher information of that difference.

    sums: [3, ...] hits, trials, expected hits.
    prior: weight of the assumption that hits are as expected, in trials.
    """
    hits, trials, expected = sums
    chance = np.where(trials > 0.0, expected / np.maximum(trials, MARGIN), 0.5)  # MARGIN: no division by 0
    offset: Floats = _logits_of((hits + prior * chance) / (trials + prior)) - _logits_of(chance)
    return offset, trials * chance * (1.0 - chance)


def _mean(sums: Floats) -> float:
    """sums: [2, ...] values and rounds."""
    return float(sums[0].sum() / max(sums[1].sum(), MARGIN))


def _shrunk(sums: Floats, prior: float) -> Floats:
    """Return [...] means of `sums`, [2, ...] values and rounds, shrunk to `prior`."""
    means: Floats = (sums[0] + NATS_WINDOW * prior) / (sums[1] + NATS_WINDOW)
    return means


def _logits_of(chances: Floats) -> Floats:
    logits: Floats = np.log(chances / (1.0 - chances))
    return logits


def _chance(logits: Floats) -> Floats:
    chances: Floats = 1.0 / (1.0 + np.exp(-logits))
    return chances
