"""Log-probabilities of rows that may be minus infinity throughout, as a shard is that is all padding."""

from torch import Tensor


def finite(norm: Tensor) -> Tensor:
    """norm [rows], a logsumexp, to take from logits: 0 for rows that are all minus infinity, which stay so."""
    return norm.masked_fill(norm == float("-inf"), 0.0)
