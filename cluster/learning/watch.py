"""Notices that a published draft accepts less than the one before. Pure.

A one-sided CUSUM (Page, Biometrika 1954) over rounds: each adds the usual acceptance, less what is tolerated, less its
own. Without a change the sum drifts down by the tolerance, and passes the limit with a probability of about
exp(-2 * tolerance * limit / variance) (Siegmund, Sequential Analysis, 1985), here 0.0001.
"""

import math
from collections.abc import Sequence

_TOLERANCE = 0.05  # share of the acceptance length by which equally good drafts may seem to differ
_FALSE_ALARM = 1e-4
MIN_ROUNDS = 256  # from which the usual acceptance is known


def noise(length: float) -> float:
    """Return by how many draft tokens a round two drafts may differ without being told apart. length: mean accepted
    draft tokens of a round."""
    return _TOLERANCE * (1 + length)


class AcceptanceWatch:
    """Rounds since a draft was published.

    usual: [k] rounds before it that accepted k draft tokens.
    is_known: whether these are enough to compare with.
    """

    def __init__(self, usual: Sequence[int]) -> None:
        count = sum(usual)
        self.is_known = count >= MIN_ROUNDS
        mean = sum(k * n for k, n in enumerate(usual)) / max(1, count)
        variance = sum((k - mean) ** 2 * n for k, n in enumerate(usual)) / max(1, count)
        tolerance = noise(mean)
        self._expected = mean - tolerance
        self._limit = max(1.0, -math.log(_FALSE_ALARM) * variance / (2 * tolerance))
        self._sum = 0.0

    def has_fallen(self, rounds: int, accepted: int) -> bool:
        """Add rounds, and return whether the acceptance has fallen."""
        if not self.is_known:
            return False
        self._sum = max(0.0, self._sum + self._expected * rounds - accepted)
        return self._sum > self._limit
