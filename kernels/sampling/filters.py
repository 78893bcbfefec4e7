"""Limits of top-k, top-p and min-p for rows of logits.

A token's gap is the distance of its logit from the row's largest, at the request's temperature: an integer in units of
2^-18 nats, at most 64 nats (a relative probability of 1e-28). A row keeps all tokens whose gap is at most its limit. So
the best token is always kept, and tokens with equal gaps are kept or dropped together.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.contracts import check_slots
from aerie.kernels.operation import Implementation, on_gpu, operation

UNITS = 262144.0  # units of a gap per nat; a power of two adds no rounding
MAX_GAP = (1 << 24) - 1  # exact in float32


@dataclass(frozen=True)
class Filters:
    """Filter parameters by slot. top_k = 0, top_p = 1 and min_p = 0 switch a filter off; greedy slots (temperature 0)
    have no filters.

    temperature, top_p, min_p  [S] float32, with equal strides
    top_k                      [S] int64, any stride
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def arguments(self) -> tuple[Any, ...]:
        """Return tensors and strides in the argument order of kernels (`is_filtered`)."""
        stride = self.temperature.stride(0)
        assert self.top_p.stride(0) == stride and self.min_p.stride(0) == stride
        return self.temperature, self.top_p, self.min_p, stride, self.top_k, self.top_k.stride(0)

    def row_values(self, slots: Tensor, rows: int) -> "Filters":
        """Return the filters by row, for `rows` rows of the requests in slots [B] int64; temperature 0 becomes 1."""
        slots = slots.repeat_interleave(rows // slots.shape[0])
        temperature = self.temperature[slots]
        return Filters(
            torch.where(temperature > 0, temperature, 1.0), self.top_k[slots], self.top_p[slots], self.min_p[slots]
        )

    def is_random(self, slots: Tensor, rows: int) -> Tensor:
        """Return [rows] bool: whether the rows of the requests in slots [B] int64 are sampled, not greedy."""
        return self.temperature[slots].repeat_interleave(rows // slots.shape[0]) > 0


@dataclass(frozen=True)
class Limits:
    """Limits of the filters, by row.

    peaks  [rows] float32: the largest logit; may be infinity for rows that keep everything
    gaps   [rows] int32: the largest gap that a row keeps
    """

    peaks: Tensor
    gaps: Tensor


def check_rows(logits: Tensor, slots: Tensor, *rest: object) -> None:
    """Assert the contract of operations on R rows of logits of each of B requests.

    logits: [B * R, n], any floating dtype, last stride 1.
    slots: [B] int64, contiguous.
    """
    assert logits.dim() == 2 and logits.stride(1) == 1 and logits.is_floating_point()
    check_slots(slots)
    assert logits.shape[0] % max(slots.shape[0], 1) == 0


@operation(Implementation("triton", "aerie.kernels.sampling.filters_triton:find_limits", on_gpu), contract=check_rows)
def find_limits(logits: Tensor, slots: Tensor, filters: Filters) -> Limits:
    """Return the limits of each row. They do not depend on other rows of the batch.

    logits  [B * R, vocab], any floating dtype, last stride 1: R rows of each of B requests
    slots   [B] int64

    The kernel sums masses in float32, so the cut of top-p may differ by 1e-5 of the mass. Its limit may be any gap
    between those of the last kept token and the next one.
    """
    rows, logits = logits.shape[0], logits.float()
    by_row = filters.row_values(slots, rows)
    limits = gap_limits(gaps(logits, by_row.temperature), by_row.top_k, by_row.top_p, by_row.min_p)
    return Limits(logits.amax(-1), torch.where(filters.is_random(slots, rows), limits, MAX_GAP))


def gaps(logits: Tensor, temperature: Tensor, peaks: Tensor | None = None) -> Tensor:
    """Return the gaps [rows, n] int32 of logits [rows, n] float32 at temperature [rows] float32 > 0. peaks: [rows]
    float32, the largest logits, if they are known."""
    peak = logits.amax(-1, keepdim=True) if peaks is None else peaks.unsqueeze(1)
    return ((peak - logits) * (UNITS / temperature).unsqueeze(1)).clamp_max(MAX_GAP).int()


def gap_limits(gap: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the largest gap that each row keeps, [rows] int32.

    top-k keeps the smallest gaps with at least k tokens in total. top-p keeps the smallest gaps with at least top_p of
    the mass that top-k keeps. min-p keeps tokens with at least min_p times the best token's probability.

    gap: [rows, n] int32.
    top_k, top_p, min_p: [rows] int64, float32, float32.
    """
    ordered = gap.sort(-1).values
    last = torch.full_like(ordered[:, :1], MAX_GAP)
    index = (top_k - 1).clamp(0, gap.shape[1] - 1).unsqueeze(1)
    by_count = torch.where(top_k.unsqueeze(1) > 0, ordered.gather(1, index), last)
    mass = torch.exp(ordered.double() / -UNITS).cumsum(-1)
    num_within = (ordered <= by_count).sum(-1, keepdim=True)
    needed = top_p.double().unsqueeze(1) * mass.gather(1, num_within - 1)
    index = (mass < needed).sum(-1, keepdim=True).clamp_max(gap.shape[1] - 1)
    by_mass = torch.where(top_p.unsqueeze(1) < 1, ordered.gather(1, index), last)
    by_share = (-torch.log(min_p) * UNITS).clamp(0, MAX_GAP).int().unsqueeze(1)
    return torch.minimum(torch.minimum(by_count, by_mass), by_share).squeeze(1)
