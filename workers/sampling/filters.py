"""What top-k, top-p and min-p keep of a row of logits, and how it is found with torch.

A token's gap is how far it lies below the row's largest logit, in the softmax at the request's temperature: whole
units of 2^-18 nats, cut off at 64 nats (a probability of 1e-28 beside the best token's). What is kept is every token
whose gap is at most the row's limit, so it does not depend on an order: tokens of one gap stay or go together, and the
best one always stays. Called by `workers.sampling.sampler`; on a GPU `workers.sampling.kernels.filters` finds the same
limits unsorted.
"""

import torch
from torch import Tensor

UNITS = 262144.0  # of a gap, per nat; a power of two, so that only one rounding stands between logits and gaps
MAX_GAP = (1 << 24) - 1  # exact in float32


def gaps(logits: Tensor, temperature: Tensor) -> Tensor:
    """[rows, n] int32 gaps of logits [rows, n] float32 at temperature [rows] float32 > 0."""
    peak = logits.amax(-1, keepdim=True)
    return ((peak - logits) * (UNITS / temperature).unsqueeze(1)).clamp_max(MAX_GAP).int()


def gap_limits(gap: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[rows] int32: the largest gap that is kept, of gaps [rows, n] int32; top_k int64, top_p and min_p float32 [rows],
    where 0, 1 and 0 switch off.

    top-k keeps the smallest gaps that hold at least k tokens, top-p the smallest ones that hold at least top_p of what
    top-k left, min-p those of at least min_p times the best token's probability.
    """
    ordered = gap.sort(-1).values
    last = torch.full_like(ordered[:, :1], MAX_GAP)
    place = (top_k - 1).clamp(0, gap.shape[1] - 1).unsqueeze(1)
    by_count = torch.where(top_k.unsqueeze(1) > 0, ordered.gather(1, place), last)
    mass = torch.exp(ordered.double() / -UNITS).cumsum(-1)
    kept = (ordered <= by_count).sum(-1, keepdim=True)
    needed = top_p.double().unsqueeze(1) * mass.gather(1, kept - 1)
    place = (mass < needed).sum(-1, keepdim=True).clamp_max(gap.shape[1] - 1)
    by_mass = torch.where(top_p.unsqueeze(1) < 1, ordered.gather(1, place), last)
    by_share = (-torch.log(min_p) * UNITS).clamp(0, MAX_GAP).int().unsqueeze(1)
    return torch.minimum(torch.minimum(by_count, by_mass), by_share).squeeze(1)
