# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of `aerie.kernels.vocabulary.largest`, which split rows over programs. torch's argmax takes 36 us for one
row of 128,256."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.vocabulary.largest import NOT_FINITE

BLOCK = 4096


@triton.jit
def _partial(x_ptr, value_ptr, index_ptr, size, row_stride, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * row_stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
    # tl.max ignores NaN, so NaN becomes infinity
    x = tl.where(x == x, x, float("inf"))
    best = tl.max(x, 0)
    # the smallest index among equals, as in torch on a CPU
    index = tl.min(tl.where(x == best, column, size), 0)
    place = row * tl.num_programs(1) + part
    tl.store(value_ptr + place, best)
    tl.store(index_ptr + place, index)


@triton.jit
def _combine(value_ptr, index_ptr, best_ptr, out_ptr, parts, size, BROKEN: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    value = tl.load(value_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    index = tl.load(index_ptr + row * parts + part, mask=part < parts, other=size)
    largest = tl.max(value, 0)
    best = tl.min(tl.where(value == largest, index, size), 0)
    tl.store(best_ptr + row, largest)
    best = tl.where(best < size, best, 0).to(tl.int64)
    tl.store(out_ptr + row, tl.where((largest == float("inf")) & (BROKEN < 0), BROKEN, best))


def combine(values: Tensor, indices: Tensor, size: int, broken: int) -> tuple[Tensor, Tensor]:
    """Return the largest of values [rows, parts] float32, and the smallest of indices [rows, parts] int32 where it
    occurs, [rows] int64; 0 if no index is below `size`.

    broken: if negative, the index of rows whose largest value is plus infinity.
    """
    rows, parts = values.shape
    best = torch.empty(rows, dtype=torch.float32, device=values.device)
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    _combine[(rows,)](
        values, indices, best, out, parts, size, BROKEN=broken, PARTS=triton.next_power_of_2(parts), num_warps=1
    )
    return best, out


def largest(logits: Tensor, checked: bool = False) -> tuple[Tensor, Tensor]:
    """`aerie.kernels.vocabulary.largest.largest`."""
    rows, size = logits.shape
    parts = triton.cdiv(size, BLOCK)
    values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    indices = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    _partial[(rows, parts)](logits, values, indices, size, logits.stride(0), BLOCK=BLOCK, num_warps=8)
    return combine(values, indices, size, NOT_FINITE if checked else 0)
