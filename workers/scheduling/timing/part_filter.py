"""A Kalman filter over the parts of log(time / table) (`aerie.workers.scheduling.timing.parts`)."""

import functools
import math

import numpy as np
from numpy.typing import NDArray

from aerie.workers.scheduling.timing.parts import PACE

# variance added per second of steps, so that a kind of step that no longer runs becomes uncertain again
MIN_PACE_DRIFT, MAX_PACE_DRIFT = 0.0003, 0.05  # for gradual changes; `StepTime` detects sudden ones
PART_DRIFT = 0.0001  # for all other parts
# Each step changes the logarithm of the pace's drift by DRIFT_GAIN times (the product of its error and the last one's,
# in standard deviations, minus DRIFT_DECAY). Successive errors of equal sign show that the pace drifts faster; with
# independent errors the estimate decays.
DRIFT_GAIN = 1 / 8
DRIFT_DECAY = 0.1
MAX_DRIFT_S = 1.0  # bound on the seconds that one step adds
MIN_NOISE = 0.02  # minimum standard deviation of one step's relative time around its mean
NOISE_WEIGHT = 1 / 32  # weight of the newest step in the estimated noise
CHANGED_PACE_ERROR = 0.3  # error of the pace after a change, so that about ten steps track it
CHANGED_PART_ERROR = 0.15  # error added then to kinds of steps that do not run
MAX_LOG = 7.0  # bound on log(time / table); a step a thousand times slower is not a measurement


class PartFilter:
    """Mean and covariance of the parts.

    The covariance attributes a difference to parts: while one shape runs, its times update the pace; the first round of
    another shape then updates that shape's part.

    prior: [parts] variances before any step is observed.
    noise: variance of the logarithm of one step's time around its mean.
    mean: [parts].
    covariance: [parts, parts].
    """

    def __init__(self, prior: NDArray[np.float64], noise: float) -> None:
        self.noise = noise
        self._prior = prior
        self._drift = np.full(len(prior), PART_DRIFT)
        self._drift[PACE] = MIN_PACE_DRIFT
        self._last_error = 0.0  # difference of the last step of a known kind, in standard deviations
        self.mean = np.zeros(len(prior))
        self.covariance = np.diag(prior)
        self._variances = self.covariance.reshape(-1)[:: len(prior) + 1]  # a view of the diagonal

    def log_factor(self, parts: list[int]) -> float:
        """Return the mean of log(time / table) of steps with these parts, within MAX_LOG."""
        return bounded(sum(map(self.mean.item, parts)))

    def covariance_of(self, parts: list[int], others: list[int]) -> float:
        """Return the covariance of two sums of parts."""
        item = self.covariance.item
        return float(sum(item(part, other) for part in parts for other in others))

    def drift(self, seconds: float) -> None:
        """Add the drift of `seconds` to the parts' variances, up to the prior ones."""
        added = self._drift * min(seconds, MAX_DRIFT_S)
        self._variances += np.minimum(added, np.maximum(self._prior - self._variances, 0.0))

    def adapt_drift(self, error: float) -> None:
        """Estimate the pace's drift from the error of a step of a known kind: observed minus predicted logarithm, in
        standard deviations. With the right drift, successive errors are independent (Mehra, 1970)."""
        change = DRIFT_GAIN * (error * self._last_error - DRIFT_DECAY)
        self._drift[PACE] = min(max(self._drift[PACE] * math.exp(change), MIN_PACE_DRIFT), MAX_PACE_DRIFT)
        self._last_error = error

    def widen(self, part: int, variance: float) -> None:
        """Add to a part's variance."""
        self._variances[part] += variance

    def learn(self, parts: list[int], difference: float) -> None:
        """Update the parts by one step. difference: observed minus predicted log(time / table)."""
        shared = functools.reduce(np.add, [self.covariance[part] for part in parts])
        total = sum(shared.item(part) for part in parts) + self.noise
        self.mean += shared * (difference / total)
        self.covariance -= np.outer(shared, shared / total)
        weight = (self.noise / total) ** 2  # a difference that uncertain parts explain says little about the noise
        self.noise = max(self.noise + NOISE_WEIGHT * weight * (difference**2 - total), MIN_NOISE**2)

    def change_pace(self, parts: list[int]) -> None:
        """Attribute a lasting difference of steps with these parts to the pace. Kinds of steps that do not run become
        less certain, because their factor may differ."""
        own = self._variances[parts].copy()
        self._variances += np.minimum(CHANGED_PART_ERROR**2, np.maximum(self._prior - self._variances, 0.0))
        self._variances[parts] = own
        self._variances[PACE] += CHANGED_PACE_ERROR**2


def bounded(logarithm: float) -> float:
    return min(max(logarithm, -MAX_LOG), MAX_LOG)


def deviation(variance: float) -> float:
    """Return the standard deviation; rounding may leave a variance just below zero."""
    return math.sqrt(max(variance, 0.0))
