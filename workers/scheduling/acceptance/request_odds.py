"""Estimates factors on the odds of acceptance from requests' own rounds, beyond the engine's estimate. Used by
`survival`.

A request's text may be easier or harder than others', and so may its last words. Pure; arrays are indexed by slot.
"""

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

REQUEST_WINDOW = 64.0  # rounds with drafts after which the weight in a request's counts is 1 / e
PLAIN_WINDOW = 16.0  # the same for rounds without drafts; shorter, because easy and hard words alternate within a text
RECENT_WINDOW = 256.0  # the same for the counts over all requests, in rounds of all requests
# The prior weight, in drafts, of the estimate for all requests in a request's ratio over all depths is REQUEST_PRIOR /
# v, within the bounds, where v is the variance of requests' log odds.
REQUEST_PRIOR = 4.0
MIN_REQUEST_PRIOR, MAX_REQUEST_PRIOR = 4.0, 32.0
RECENT_PRIOR = 32.0  # prior weight, in drafts, of the engine's estimate in the ratio of all recent requests
DEPTH_PRIOR = 96.0  # prior weight, in rounds, of the ratio over all depths in the ratio of one depth
MAX_RATIO = 50.0  # bound on a request's odds relative to the engine's, over all depths, either way
SPREAD = 0.5  # standard deviation of requests' log odds around the engine's, before any request has ended
SPREAD_PRIOR = 4.0  # weight of SPREAD in its later estimate, in requests
SPREAD_INFORMATION = 5.0  # variance of the accepted drafts of each of these SPREAD_PRIOR requests
SPREAD_WINDOW = 32.0  # ended requests after which the weight in that estimate is 1 / e
MAX_SPREAD = 1.5  # bound on that estimate
EPSILON = 1e-9  # avoids 0 / 0


class RequestOdds:
    """Compares accepted drafts with the expected number, for all recent requests and for each request.

    The ratio of all recent requests applies to every request, so a new one starts like the last ones. A request's own
    ratio is relative to that. Both apply to every depth; a depth that the request has often reached has its own ratio.
    Counts decay with every round, also without drafts, because a request whose drafts have failed may since be past its
    hard words.

    recent: the ratio of all recent requests, as of the last `update`.
    """

    def __init__(self, max_depth: int, num_slots: int) -> None:
        self.recent = 1.0
        self._column = np.arange(max_depth)[:, None]
        self._counts = np.zeros((3, max_depth, num_slots))  # hits, trials, hits expected with `recent`
        self._recent = np.zeros(3)  # over all requests and depths: hits, trials, hits expected without `recent`
        information = SPREAD_PRIOR * SPREAD_INFORMATION
        squared = information * SPREAD_INFORMATION
        # sums over ended requests: (hits - expected)^2, information, information^2; see `_variance`
        self._ended = np.array([information + squared * SPREAD**2, information, squared])

    def count(self, slots: Ints, hits: Bools, trials: Bools, current: Bools, odds: Floats) -> Floats:
        """Count rounds with drafts. Return [num_slots]: the variance of each request's hits.

        slots: [n]; a slot may occur more than once.
        hits, trials: [depth, n] whether each draft was accepted, and whether it was verified after accepted ones.
        current: [n] False if another request has the slot now.
        odds: [depth, num_slots] expected odds of acceptance, without the ratios of this class.
        """
        num_slots = odds.shape[1]
        kept, added = kept_and_added(np.bincount(slots[current], minlength=num_slots) / REQUEST_WINDOW)
        cells = self._column * num_slots + slots
        new = np.empty(self._counts.shape)
        for of_request, outcome in zip(new, (hits, trials), strict=False):
            counts = np.bincount(cells[outcome & current], minlength=of_request.size)
            np.multiply(counts.reshape(of_request.shape), added, out=of_request)
        kept_recent, added_recent = kept_and_added(np.array(len(slots) / RECENT_WINDOW))
        of_all = new[1].sum(), (new[1] * (odds / (1.0 + odds))).sum()
        self._recent *= kept_recent
        self._recent += np.array((new[0].sum(), *of_all)) * added_recent
        odds = odds * self.recent
        chances = odds / (1.0 + odds)
        np.multiply(new[1], chances, out=new[2])
        self._counts *= kept
        self._counts += new
        variance: Floats = (new[2] * (1.0 - chances)).sum(0)
        return variance

    def count_plain(self, num_rounds: Ints) -> None:
        """Count rounds without drafts. num_rounds: [num_slots]."""
        self._counts *= np.exp(-num_rounds / PLAIN_WINDOW)
        self._recent *= math.exp(-int(num_rounds.sum()) / RECENT_WINDOW)

    def update(self) -> None:
        """Estimate `recent` again."""
        hits, trials, expected = self._recent.tolist()
        usual = RECENT_PRIOR * (expected / trials if trials > 0.0 else 0.5)
        ratio = odds_ratio(*map(np.array, (hits + usual, trials + RECENT_PRIOR, expected + usual)))
        self.recent = min(max(float(ratio), 1.0 / MAX_RATIO), MAX_RATIO)

    def factors(self, slots: Ints, odds: Floats) -> Floats:
        """Return [depth, n]: the factors on `odds`, [depth, n], for the requests in these slots."""
        odds = odds * self.recent
        hits, trials, expected = self._counts[:, :, slots]
        total, prior = trials.sum(0), REQUEST_PRIOR / max(self._variance(), EPSILON)
        prior = min(max(prior, MIN_REQUEST_PRIOR), MAX_REQUEST_PRIOR)
        usual = prior * np.where(total > 0, expected.sum(0) / np.maximum(total, EPSILON), 0.5)
        over_all = odds_ratio(hits.sum(0) + usual, total + prior, expected.sum(0) + usual)
        of_request = odds * np.clip(over_all, 1.0 / MAX_RATIO, MAX_RATIO)
        own, engine = (DEPTH_PRIOR * each / (1.0 + each) for each in (of_request, odds))
        return self.recent * odds_ratio(hits + own, trials + DEPTH_PRIOR, expected + engine)

    def errors(self, slots: Ints) -> Floats:
        """Return [n]: the standard deviation of the logarithm of each request's factor. It decreases from the spread of
        requests towards 0 with the request's own rounds."""
        _, trials, expected = self._counts[:, :, slots].sum(1)
        variance = self._variance()
        found: Floats = np.sqrt(variance / (1.0 + variance * _information(trials, expected)))
        return found

    def ended(self, slots: Ints) -> tuple[Floats, Floats]:
        """Learn from requests that have ended, and forget their counts. Return, [n] each, their accepted drafts minus
        the expected number, and the expected variance of that."""
        hits, trials, expected = self._counts[:, :, slots].sum(1)
        excess: Floats = hits - expected
        information = _information(trials, expected)
        ended = np.array((excess**2, information, information**2))
        self._ended = self._ended * math.exp(-np.count_nonzero(information) / SPREAD_WINDOW) + ended.sum(1)
        self._counts[:, :, slots] = 0.0
        return excess, information

    def _variance(self) -> float:
        """Return the variance v of requests' log odds around the engine's. If a request's hits have variance I, the
        mean of (hits - expected)^2 is I + v * I^2."""
        squares, information, squared = self._ended.tolist()
        return float(min(max((squares - information) / squared, 0.0), MAX_SPREAD**2))


def odds_ratio(hits: Floats, trials: Floats, expected: Floats) -> Floats:
    """Return the ratio of the odds of `hits` among `trials` to those of `expected`."""
    ratio: Floats = hits * (trials - expected) / ((trials - hits) * expected)
    return ratio


def kept_and_added(age: Floats) -> tuple[Floats, Floats]:
    """Return the factors on old counts and on new ones, if new rounds decay the counts by `age` windows. The new rounds
    decay each other, too; their factor is the mean."""
    kept = np.exp(-age)
    return kept, (1.0 - kept + EPSILON) / (age + EPSILON)


def _information(trials: Floats, expected: Floats) -> Floats:
    """Return the expected variance of requests' hits. It is also the Fisher information about their log odds."""
    found: Floats = expected * (1.0 - expected / np.maximum(trials, EPSILON))
    return found
