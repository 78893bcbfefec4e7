"""Draft logits with the request's Gumbel noise, and with filtered tokens below all others.

With the noise, the draft proposes the token that the target is likely to sample. The filters affect only which tokens
are proposed, not which are emitted, so they may be approximate and must be cheap. Tokens are counted by band, the
integer part of the scaled logit (log2 of the probability, up to a constant per row). Top-k and top-p keep whole bands;
top-p counts every token of a band with the lowest mass of that band. Min-p is exact.
"""

import torch
from torch import Tensor

from aerie.kernels.attend.scores import LOG2_E
from aerie.kernels.contracts import check_slots
from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.sampling.choose import Draws
from aerie.kernels.sampling.filters import Filters, check_rows

BANDS = 32  # from the best token down to 2^-31 of its probability
DROPPED = 1024.0  # subtracted from the scores of filtered tokens; does not change their order
PART = 4096  # columns per part


def _check_scores(logits: Tensor, draws: Draws, ids: Tensor, filters: Filters, summary: Tensor | None) -> None:
    check_slots(draws.slots)
    assert logits.dim() == 2 and logits.stride(1) == 1 and logits.is_floating_point()
    assert ids.shape in (logits.shape, logits.shape[1:]) and ids.dtype == torch.int64 and ids.is_contiguous()
    assert summary is None or summary.dtype == torch.float32


@operation(
    Implementation("triton", "aerie.kernels.sampling.draft_scores_triton:count_bands", on_gpu), contract=check_rows
)
def count_bands(logits: Tensor, slots: Tensor, filters: Filters) -> Tensor:
    """Summarise the parts of a vocabulary shard.

    logits  [B * R, n], any floating dtype, last stride 1: R rows of each of B requests
    slots   [B] int64
    ->      [B * R, ceil(n / PART), 1 + BANDS] float32: the part's largest scaled logit, then the number of tokens in
            its band and in each band below; undefined for rows without filters
    """
    rows, size = logits.shape
    scaled = scaled_logits(logits.float(), filters.row_values(slots, rows).temperature)
    if size > PART:
        scaled = torch.nn.functional.pad(scaled, (0, -size % PART), value=float("-inf"))
    scaled = scaled.view(rows, -1, min(size, PART))
    peak = scaled.amax(-1, keepdim=True)
    below = (peak.floor() - scaled.floor()).nan_to_num(BANDS).clamp_max(BANDS).long()
    counts = torch.zeros((*scaled.shape[:2], BANDS + 1), device=scaled.device)
    counts.scatter_add_(2, below, torch.ones_like(scaled))
    return torch.cat((peak, counts[..., :BANDS]), dim=2)


@operation(
    Implementation("triton", "aerie.kernels.sampling.draft_scores_triton:perturb", on_gpu), contract=_check_scores
)
def perturb(logits: Tensor, draws: Draws, ids: Tensor, filters: Filters, summary: Tensor | None) -> Tensor:
    """Return logits / temperature + noise, with filtered tokens below all others; greedy rows unchanged.

    logits   [B * R, n], any floating dtype, last stride 1
    ids      [n] or [B * R, n] int64, contiguous: token ids of the columns, of all rows or of each
    summary  [B * R, parts, 1 + BANDS] float32, `count_bands` of all shards; None without filters
    ->       [B * R, n] float32
    """
    noisy = draws.perturbed(logits, ids)
    if summary is None:
        return noisy
    by_row = filters.row_values(draws.slots, logits.shape[0])
    scaled = scaled_logits(logits.float(), by_row.temperature)
    lowest = lower_bound(summary, by_row.top_k, by_row.top_p, by_row.min_p)
    random = filters.is_random(draws.slots, logits.shape[0])
    return torch.where(random.unsqueeze(1) & (scaled < lowest.unsqueeze(1)), noisy - DROPPED, noisy)


def scaled_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return logits [rows, n] float32 / temperature [rows] float32 > 0, in base 2: [rows, n] float32."""
    return logits * (temperature.reciprocal() * LOG2_E).unsqueeze(1)


def lower_bound(summaries: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the lowest scaled logit that each row keeps: [rows] float32.

    summaries: [rows, parts, 1 + BANDS] float32.
    top_k, top_p, min_p: [rows] int64, float32, float32; 0, 1 and 0 switch a filter off.
    """
    peaks, counts = summaries[..., 0], summaries[..., 1:]
    peak = peaks.amax(1)
    band = torch.arange(BANDS, device=summaries.device)
    # a part's bands start at its own best token, which is `lower` bands below the row's
    lower = (peak.floor().unsqueeze(1) - peaks.floor()).clamp_max(BANDS).long().unsqueeze(2)
    column = band - lower
    counts = torch.where(column >= 0, counts.gather(2, column.clamp_min(0)), 0.0).sum(1).long()
    by_count = (counts.cumsum(1) < top_k.unsqueeze(1)).sum(1)
    by_count = torch.where(top_k > 0, by_count, BANDS)
    # masses in units of 2^-31 of the best band's, because integer sums do not depend on the order
    mass = torch.where(band <= by_count.unsqueeze(1), counts, 0) << (BANDS - 1 - band)
    mass = mass.cumsum(1).float()
    by_mass = (mass < top_p.unsqueeze(1) * mass[:, -1:]).sum(1)
    by_mass = torch.where(top_p < 1, by_mass, BANDS)
    last = torch.minimum(by_count, by_mass)
    lowest = torch.where(last < BANDS, peak.floor() - last, float("-inf"))
    return torch.maximum(lowest, peak + torch.log2(min_p))
