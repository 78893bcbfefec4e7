"""How hard each request's text is to predict, and what that says of the acceptance of drafts.

Drafts are accepted where the target is sure. Every round tells how sure it is, with drafts or without, so plain rounds
show that speculation would pay for a request's text. Pure, arrays over slots.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MAX_NATS = 6.0  # limit of a min-entropy
REQUEST_WINDOW = 24.0  # rounds after which a request's mean has forgotten all but 1 / e
REQUEST_PRIOR = 8.0  # weight, in rounds, of the last requests' mean in a request's own
RECENT_WINDOW = 64.0  # steps of all requests after which their mean has forgotten all but 1 / e
DRAFTED_WINDOW = 2048.0  # the same of one family's rounds with drafts
FAMILY_PRIOR = 32.0  # weight, in rounds, of the mean of all families in that of one
SLOPE = 2.5  # log odds of acceptance that a request loses with each nat, before any request has ended,
SLOPE_ERROR = 0.4  # and its standard deviation
REST = 0.1  # variance of requests' log odds that no min-entropy explains
MAX_SLOPE = 5.0
MAX_LOG_ODDS = 2.2  # limit of the effect
ROOM = 0.5  # added to the information of a request, so that one without hits, or with hits alone, stays finite


class Difficulty:
    """The target's min-entropy (the negative logarithm of its largest probability) in nats: of each request, of the
    last requests, and of the rounds that each family of shapes was learnt from. A linear regression on ended requests
    (a Kalman filter of one state) says how the log odds of acceptance fall with a request's difference from these
    rounds.

    slope: log odds for a nat.
    """

    def __init__(self, num_slots: int, num_families: int) -> None:
        self.slope = SLOPE
        self._slope_variance = SLOPE_ERROR**2
        self._of_slot = np.zeros((2, num_slots))  # nats and rounds, decayed
        self._recent = np.zeros(2)
        self._drafted = np.zeros((2, num_families))

    def count(self, steps: Sequence[tuple[int, Ints, Ints, Floats]], current: Ints) -> None:
        """Count the rounds of some steps, in their order.

        steps: the family of the verified shape, -1 of plain rounds; slots [n]; the requests in them [n]; and
            min-entropies [n] in nats, NaN where unknown.
        current: [slots] the requests of now, whose means are updated.
        """
        slots, users, nats = (np.concatenate([step[i] for step in steps]) for i in (1, 2, 3))
        families = np.repeat([step[0] for step in steps], [len(step[1]) for step in steps])
        known = nats >= 0.0  # false of NaN
        nats = np.where(known, np.minimum(nats, MAX_NATS), 0.0)
        _add(self._recent, nats, known, RECENT_WINDOW * len(slots) / len(steps))
        for family in set(families.tolist()) - {-1}:
            _add(self._drafted[:, family], nats, known & (families == family), DRAFTED_WINDOW)
        own = known & (users == current[slots])
        num_slots = self._of_slot.shape[1]
        rounds = np.bincount(slots[own], minlength=num_slots)
        total = np.bincount(slots[own], nats[own], num_slots)
        self._of_slot *= np.exp(-rounds / REQUEST_WINDOW)
        self._of_slot += total, rounds

    def log_odds(self, slots: Ints) -> Floats:
        """Return [families, n]: by how much the log odds that a request's draft is accepted differ from those of the
        rounds of a family, as far as its min-entropy tells."""
        found: Floats = np.clip(-self.slope * self._difference(slots), -MAX_LOG_ODDS, MAX_LOG_ODDS)
        return found

    def ended(self, slots: Ints, family: int, excess: Floats, information: Floats) -> None:
        """Learn from requests that have ended, and forget them.

        family: of the last rounds with drafts, with whose estimate theirs are compared.
        excess: [n] accepted drafts beyond those that were expected of each request, with its `log_odds`.
        information: [n] the variance of its accepted drafts; 0 without rounds with drafts.
        """
        difference = self._difference(slots)[family]
        for nats, more, variance in zip(difference.tolist(), excess.tolist(), information.tolist(), strict=True):
            if variance > 0.0:
                error = nats**2 * self._slope_variance + 1.0 / (variance + ROOM) + REST
                gain = self._slope_variance * nats / error
                self.slope = min(max(self.slope - gain * more / (variance + ROOM), 0.0), MAX_SLOPE)
                self._slope_variance *= 1.0 - gain * nats
        self._of_slot[:, slots] = 0.0

    def _difference(self, slots: Ints) -> Floats:
        """Return [families, n]: nats by which requests are harder than a family's rounds; 0 before there are any."""
        drafted, rounds = self._drafted
        if not rounds.any():
            return np.zeros((len(rounds), len(slots)))
        usual = float(drafted.sum() / rounds.sum())
        recent, recent_rounds = self._recent.tolist()
        recent = (recent + REQUEST_PRIOR * usual) / (recent_rounds + REQUEST_PRIOR)
        total, own_rounds = self._of_slot[:, slots]
        of_family = (drafted + FAMILY_PRIOR * usual) / (rounds + FAMILY_PRIOR)
        difference: Floats = (total + REQUEST_PRIOR * recent) / (own_rounds + REQUEST_PRIOR) - of_family[:, None]
        return difference


def _add(sums: Floats, nats: Floats, counted: Bools, window: float) -> None:
    """Add rounds to decayed sums [nats, rounds], in place."""
    num_rounds = np.count_nonzero(counted)
    if num_rounds:
        sums *= math.exp(-num_rounds / window)
        sums += nats[counted].sum(), num_rounds
