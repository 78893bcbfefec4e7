"""Estimates how many tokens answers will have, from those that have ended and those that run. Used by
`aerie.workers.scheduling.queues.admission`; pure.

Answers that reach `max_tokens` show only that they would have been longer, and so do running ones. So the estimate is a
rate of stops per token, by the length so far (as `acceptance` does for drafts; Kaplan and Meier, 1958).
"""

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

FIRST_LENGTH, FIRST_STOPS = 256.0, 0.05  # before any answer: the mean, and its weight in stops
BUCKET_STOPS = 2.0  # weight of the mean over all lengths in a bucket's rate, in stops
MEMORY = 512.0  # answers after which an answer's weight is 1 / e
_STARTS = [0.0, *(float(8 << power) for power in range(18))]  # lengths at which buckets begin
_EDGES = np.array(_STARTS)
_WIDTHS = np.append(np.diff(_EDGES), np.inf)


class AnswerLengths:
    """Stops and tokens by bucket of the length so far.

    While few answers have ended, the estimate errs towards short answers by a standard error, because a request that is
    refused in error is worse than one that waits in vain.
    """

    def __init__(self) -> None:
        self._stops = np.zeros(len(_EDGES))
        self._tokens = np.zeros(len(_EDGES))

    def ended(self, num_tokens: int, has_stopped: bool) -> None:
        """Count an answer. has_stopped: whether it ended by itself, not at its limit."""
        kept = 1.0 - 1.0 / MEMORY
        self._tokens = kept * self._tokens + _passed(np.array([num_tokens]))
        self._stops *= kept
        self._stops[bisect_right(_STARTS, num_tokens) - 1] += has_stopped

    def forecast(self, running: npt.NDArray[np.int64]) -> "LengthForecast":
        """Return the estimate. running: [n] tokens so far of running requests."""
        tokens = self._tokens + _passed(running)
        num_stops = self._stops.sum()
        rate = (num_stops + np.sqrt(num_stops) + FIRST_STOPS) / (tokens.sum() + FIRST_STOPS * FIRST_LENGTH)
        return LengthForecast((self._stops + BUCKET_STOPS) / (tokens + BUCKET_STOPS / rate))


class LengthForecast:
    """Quantiles of the length of answers. rates: stops per token, by bucket."""

    def __init__(self, rates: npt.NDArray[np.float64]) -> None:
        self._rates: list[float] = rates.tolist()
        self._hazards: list[float] = [0.0, *np.cumsum(rates[:-1] * _WIDTHS[:-1]).tolist()]

    def length(self, num_so_far: int, max_tokens: int, hazard: float) -> float:
        """Return the length of an answer with `num_so_far` tokens. hazard: a draw from the exponential distribution of
        mean 1."""
        bucket = bisect_right(_STARTS, num_so_far) - 1
        hazard += self._hazards[bucket] + self._rates[bucket] * (num_so_far - _STARTS[bucket])
        bucket = bisect_right(self._hazards, hazard) - 1
        return min(float(max_tokens), _STARTS[bucket] + (hazard - self._hazards[bucket]) / self._rates[bucket])


def _passed(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the tokens of all answers in each bucket."""
    found: npt.NDArray[np.float64] = np.clip(lengths[:, None] - _EDGES, 0.0, _WIDTHS).sum(0)
    return found
