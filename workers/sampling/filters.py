"""What top-k, top-p and min-p keep of a row of logits, and how it is found with torch.

A token's gap is how far it lies below the row's largest logit, in the softmax at the request's temperature: whole
units of 2^-18 nats, cut off at 64 nats (a probability of 1e-28 beside the best token's). What is kept is every token
whose gap is at most the row's limit, so it does not depend on an order: tokens of one gap stay or go together, and the
best one always stays. Called by `workers.sampling.sampler`; on a GPU `workers.sampling.kernels.filters` finds the same
limits unsorted, and `workers.sampling.kernels.draft_scores` what a draft keeps.
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


# How a draft applies a request's filters. What it keeps decides which tokens are proposed and none that is emitted, so
# it need not be exact, and must cost little in each of its steps: tokens are counted by level, the whole part of a
# token's scaled logit, its probability's binary logarithm but for a constant of its row. Top-k and top-p keep whole
# levels, of which each token weighs what its lowest may; min-p is exact.
LEVELS = 32  # from the best token's down, to 2^-31 of its probability
LOG2_E = 1.4426950408889634
DROPPED = 1024.0  # taken from the score of a token that is not kept: below all that are, and in an order of their own


def scaled_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """[rows, n] float32: logits [rows, n] float32 at temperature [rows] float32 > 0, in units of a factor of two."""
    return logits * (temperature.reciprocal() * LOG2_E).unsqueeze(1)


def count_levels(scaled: Tensor) -> Tensor:
    """[rows, 1, 1 + LEVELS] float32 summary of a shard's scaled logits [rows, n]: the largest, and how many there are
    in its level and in each of those below."""
    peak = scaled.amax(-1, keepdim=True)
    below = (peak.floor() - scaled.floor()).nan_to_num(LEVELS).clamp_max(LEVELS).long()
    counts = torch.zeros((scaled.shape[0], LEVELS + 1), device=scaled.device)
    counts.scatter_add_(1, below, torch.ones_like(scaled))
    return torch.cat((peak, counts[:, :LEVELS]), dim=1).unsqueeze(1)


def lowest_kept(summaries: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[rows] float32: the lowest scaled logit that is kept, of summaries [rows, parts, 1 + LEVELS] of a row's parts;
    top_k int64, top_p and min_p float32 [rows], where 0, 1 and 0 switch off."""
    peaks, counts = summaries[..., 0], summaries[..., 1:]
    peak = peaks.amax(1)
    level = torch.arange(LEVELS, device=summaries.device)
    # a part's level, counted from its own best token, lies so many further down from the row's
    lower = (peak.floor().unsqueeze(1) - peaks.floor()).clamp_max(LEVELS).long().unsqueeze(2)
    place = level - lower
    counts = torch.where(place >= 0, counts.gather(2, place.clamp_min(0)), 0.0).sum(1).long()
    by_count = (counts.cumsum(1) < top_k.unsqueeze(1)).sum(1)
    by_count = torch.where(top_k > 0, by_count, LEVELS)
    # masses in units of 2^-31 of the best level's: whole numbers, so that their sums do not depend on an order
    mass = torch.where(level <= by_count.unsqueeze(1), counts, 0) << (LEVELS - 1 - level)
    mass = mass.cumsum(1).float()
    by_mass = (mass < top_p.unsqueeze(1) * mass[:, -1:]).sum(1)
    by_mass = torch.where(top_p < 1, by_mass, LEVELS)
    last = torch.minimum(by_count, by_mass)
    lowest = torch.where(last < LEVELS, peak.floor() - last, float("-inf"))
    return torch.maximum(lowest, peak + torch.log2(min_p))
