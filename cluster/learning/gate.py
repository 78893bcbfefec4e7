"""Whether a candidate drafts better than the served weights. Pure.

A paired bootstrap over texts (Efron and Tibshirani 1993, chapter 13): both have drafted in the same texts, whole texts
are drawn again with replacement, and the gain's lower bound is its 5 % quantile.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

_DRAWS = 2000  # resamples of the bootstrap
_QUANTILES = 5.0, 95.0  # per cent

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Rounds = Sequence[tuple[int, int]]  # (rounds, draft tokens that they accepted) of each text


class Gain(NamedTuple):
    """A candidate's acceptance length relative to the served one, minus 1. low, high: bounds at 5 and 95 %.

    served, candidate: acceptance lengths (1 + accepted / rounds).
    """

    gain: float
    low: float
    high: float
    served: float
    candidate: float


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A trained draft. The first fields are those of `Gain`.

    num_texts: that it was measured on.
    folder: its files; "": it is not better.
    """

    gain: float
    low: float
    high: float
    served: float
    candidate: float
    num_texts: int
    folder: str = ""


def gain_of(served: Rounds, candidate: Rounds, seed: int = 0) -> Gain:
    """Compare rounds in the same texts. Raises ValueError without a round."""
    old, new = np.asarray(served, np.float64), np.asarray(candidate, np.float64)
    if old.shape != new.shape or not len(old) or old[:, 0].sum() == 0 or new[:, 0].sum() == 0:
        raise ValueError("the texts have no rounds to compare")
    drawn = np.random.default_rng(seed).integers(0, len(old), (_DRAWS, len(old)))
    ratios = _length(new[drawn]) / _length(old[drawn]) - 1
    low, high = np.percentile(ratios, _QUANTILES)
    before, after = _length(old), _length(new)
    return Gain(float(after / before - 1), float(low), float(high), float(before), float(after))


def _length(
    rounds: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]",
) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    """Return acceptance lengths [..] of rounds [.., texts, 2]."""
    sums = rounds.sum(axis=-2)
    lengths: Numbers = 1 + sums[..., 1] / np.maximum(1, sums[..., 0])
    return lengths
