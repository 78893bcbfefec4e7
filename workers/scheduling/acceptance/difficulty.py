"""Predicts the acceptance of a request's drafts from the target's certainty. Used by `survival`.

Drafts are accepted more often where the target is certain of the next token. Rounds without drafts report that
certainty, too, and so can show that speculation would pay for a request. Pure; arrays are indexed by slot.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MAX_NATS = 6.0  # larger min-entropies are clipped to this
# windows of the decayed means, after which a value's weight is 1 / e
REQUEST_WINDOW = 24.0  # rounds, for a request's own mean
RECENT_WINDOW = 64.0  # steps, for the mean over all requests
DRAFTED_WINDOW = 2048.0  # rounds with drafts, for a family's mean
REQUEST_PRIOR = 8.0  # prior weight, in rounds, of the mean over all requests in a request's own mean
FAMILY_PRIOR = 32.0  # prior weight, in rounds, of the mean over all families in a family's mean
# First estimate of the slope: the decrease of a request's log odds of acceptance per nat of its running mean. For whole
# answers of the embedded pair it is 2.0 to 2.4 per nat of their own mean.
SLOPE = 1.8
SLOPE_ERROR = 0.4  # standard error of SLOPE
RESIDUAL_VARIANCE = 0.4  # variance of requests' log odds not explained by min-entropy
MAX_SLOPE = 5.0
MAX_LOG_ODDS = 2.2  # bound on `log_odds`, either way
MIN_INFORMATION = 0.5  # added to a request's variance, which is 0 if all or none of its drafts were accepted


class Difficulty:
    """Corrects the log odds of acceptance by the target's min-entropy, -log(largest probability), in nats.

    Keeps decayed means of the min-entropy: of each request, of all recent requests, and for each family of shapes
    (`Survival.family`) of its rounds with drafts. If a request's mean is d nats above a family's mean, its log odds
    decrease by slope * d. The slope is fitted to ended requests (linear regression by a Kalman filter with one state).

    slope: log odds lost per nat.
    """

    def __init__(self, num_slots: int, num_families: int) -> None:
        self.slope = SLOPE
        self._slope_variance = SLOPE_ERROR**2
        self._by_slot = np.zeros((2, num_slots))  # sums of nats and of rounds, decayed, as in the two below
        self._recent = np.zeros(2)
        self._drafted = np.zeros((2, num_families))
        self._used = np.zeros((num_families, num_slots))  # differences in nats last used by `log_odds`
        # sums over each request's rounds with drafts: variance of the hits times the difference used; variance
        self._weighed = np.zeros((2, num_slots))

    def count(self, steps: Sequence[tuple[int, Ints, Ints, Floats]], current: Ints) -> None:
        """Add the rounds of some steps, in order, to the means.

        steps: (family, slots, numbers, nats) of each step. family: family of the verified shape; -1 without drafts.
            slots: [n]. numbers: [n] numbers of the requests that had these slots. nats: [n] min-entropies, NaN if
            unknown.
        current: [num_slots] numbers of the requests that have the slots now; only their own means are updated.
        """
        slots, numbers, nats = (np.concatenate([step[i] for step in steps]) for i in (1, 2, 3))
        families = np.repeat([step[0] for step in steps], [len(step[1]) for step in steps])
        known = nats >= 0.0  # False for NaN
        nats = np.where(known, np.minimum(nats, MAX_NATS), 0.0)
        _add(self._recent, nats, known, RECENT_WINDOW * len(slots) / len(steps))
        for family in set(families.tolist()) - {-1}:
            _add(self._drafted[:, family], nats, known & (families == family), DRAFTED_WINDOW)
        own = known & (numbers == current[slots])
        num_slots = self._by_slot.shape[1]
        rounds = np.bincount(slots[own], minlength=num_slots)
        total = np.bincount(slots[own], nats[own], num_slots)
        self._by_slot *= np.exp(-rounds / REQUEST_WINDOW)
        self._by_slot += total, rounds

    def log_odds(self, slots: Ints) -> Floats:
        """Return [families, n]: the correction of a family's log odds of acceptance for the request in each slot."""
        self._used[:, slots] = difference = self._difference(slots)
        added: Floats = np.clip(-self.slope * difference, -MAX_LOG_ODDS, MAX_LOG_ODDS)
        return added

    def weigh(self, family: int, variance: Floats) -> None:
        """Record how informative a family's rounds with drafts are about the slope. variance: [num_slots] variance of
        their hits."""
        self._weighed += variance * self._used[family], variance

    def ended(self, slots: Ints, family: int, excess: Floats, information: Floats) -> None:
        """Fit the slope to requests that have ended, and forget their means.

        slots: [n] their slots.
        family: the family of the last rounds with drafts; the requests are compared with its mean.
        excess: [n] accepted drafts of each request minus the number expected with its `log_odds`.
        information: [n] expected variance of that number; 0 for a request without drafts, which is skipped.

        The excess is explained by the differences used for the expected number (`weigh`), not by those at the end,
        which may be far from these.
        """
        weighed, total = self._weighed[:, slots]
        difference = np.where(total > 0.0, weighed / np.maximum(total, 1e-9), self._difference(slots)[family])
        for nats, more, variance in zip(difference.tolist(), excess.tolist(), information.tolist(), strict=True):
            if variance > 0.0:
                error = nats**2 * self._slope_variance + 1.0 / (variance + MIN_INFORMATION) + RESIDUAL_VARIANCE
                gain = self._slope_variance * nats / error
                self.slope = min(max(self.slope - gain * more / (variance + MIN_INFORMATION), 0.0), MAX_SLOPE)
                self._slope_variance *= 1.0 - gain * nats
        self._by_slot[:, slots] = self._weighed[:, slots] = self._used[:, slots] = 0.0

    def _difference(self, slots: Ints) -> Floats:
        """Return [families, n]: each request's mean min-entropy minus the family's; 0 before any round with drafts."""
        drafted, rounds = self._drafted
        if not rounds.any():
            return np.zeros((len(rounds), len(slots)))
        over_families = float(drafted.sum() / rounds.sum())
        recent, recent_rounds = self._recent.tolist()
        recent = (recent + REQUEST_PRIOR * over_families) / (recent_rounds + REQUEST_PRIOR)
        total, own_rounds = self._by_slot[:, slots]
        of_family = (drafted + FAMILY_PRIOR * over_families) / (rounds + FAMILY_PRIOR)
        difference: Floats = (total + REQUEST_PRIOR * recent) / (own_rounds + REQUEST_PRIOR) - of_family[:, None]
        return difference


def _add(sums: Floats, nats: Floats, counted: Bools, window: float) -> None:
    """Decay `sums`, [nats, rounds], and add the counted rounds to it, in place."""
    num_rounds = np.count_nonzero(counted)
    if num_rounds:
        sums *= math.exp(-num_rounds / window)
        sums += nats[counted].sum(), num_rounds
