# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of `aerie.kernels.vocabulary.topk_log_softmax`, which split rows over programs. `topk_log_softmax` is two
launches; torch's topk and logsumexp take a dozen, and 80 us for one row. Up to ONE_BY_ONE tokens are found one after
another, more by sorting. `largest` replaces torch's argmax, which takes 36 us for one row of 128,256."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.score_order_triton import index_of, score_of, sort_key
from aerie.kernels.vocabulary.topk_log_softmax import MAX_K, NOT_FINITE

BLOCK = 4096  # logits per program
ONE_BY_ONE = 16  # maximum k for which tokens are found one after another
ALIGNED = 4  # float32 numbers in 16 bytes


@triton.jit
def _partial(
    x_ptr,
    value_ptr,
    index_ptr,
    top_ptr,
    total_ptr,
    size,
    row_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    SORTED: tl.constexpr,
):
    """Find the K best of a row's BLOCK columns, and their maximum and sum of exponentials. SORTED: by `tl.topk`; else
    one after another.

    x_ptr: [rows, size] logits, row_stride between rows.
    value_ptr, index_ptr: [rows, parts, K], written: the best logits and their columns.
    top_ptr, total_ptr: [rows, parts] float32, written: maximum, and sum of exp(logit - maximum).
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * row_stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
    part_row = row * tl.num_programs(1) + part
    top = tl.max(x, 0)
    origin = tl.where(top == float("-inf"), 0.0, top)
    tl.store(top_ptr + part_row, top)
    tl.store(total_ptr + part_row, tl.sum(tl.exp(x - origin), 0))
    if SORTED:
        x = tl.where(x == x, x, float("-inf"))
        key = tl.topk(sort_key(x, tl.arange(0, BLOCK), BLOCK), K)
        entries = part_row * K + tl.arange(0, K)
        tl.store(value_ptr + entries, score_of(key))
        tl.store(index_ptr + entries, part * BLOCK + index_of(key, BLOCK))
        return
    for i in tl.static_range(K):
        best = tl.max(x, 0)  # ignores NaN
        # the smallest column among equals: see the contract
        index = tl.min(tl.where(x == best, column, size), 0)
        tl.store(value_ptr + part_row * K + i, best)
        tl.store(index_ptr + part_row * K + i, index)
        # NaN, not minus infinity, because masked tokens are minus infinity and this token must not be found again
        x = tl.where(column == index, float("nan"), x)


@triton.jit
def _combine(
    value_ptr,
    index_ptr,
    top_ptr,
    total_ptr,
    log_probability_ptr,
    id_ptr,
    norm_ptr,
    parts,
    size,
    k,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SORTED: tl.constexpr,
):
    """Choose a row's k best of all parts, and subtract the log-sum-exp.

    value_ptr, index_ptr: [rows, parts, K] the largest logits of each part, and their columns.
    top_ptr, total_ptr: [rows, parts] largest logit of each part, and its sum of exp(logit - largest).
    log_probability_ptr, id_ptr: [rows, k], written, best first.
    norm_ptr: [rows] log-sum-exp, written.
    size: columns of a row.
    K, PARTS, COLUMNS: k, parts and parts * K, padded.
    SORTED: choose by sorting; else one after another.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    tops = tl.load(top_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    totals = tl.load(total_ptr + row * parts + part, mask=part < parts, other=0.0)
    top = tl.max(tops, 0)
    origin = tl.where(top == float("-inf"), 0.0, top)
    # the sum is at least 1, except in rows of minus infinity
    norm = top + tl.log(tl.maximum(tl.sum(totals * tl.exp(tops - origin), 0), 1.0))
    tl.store(norm_ptr + row, norm)
    origin = tl.where(norm == float("-inf"), 0.0, norm)
    column = tl.arange(0, COLUMNS)
    value = tl.load(value_ptr + row * parts * K + column, mask=column < parts * K, other=float("-inf"))
    index = tl.load(index_ptr + row * parts * K + column, mask=column < parts * K, other=size)
    if SORTED:  # parts are in order of columns, and each part's tokens in order of score and column
        key = tl.topk(sort_key(value, column, COLUMNS), K)
        chosen = tl.load(index_ptr + row * parts * K + index_of(key, COLUMNS), mask=index_of(key, COLUMNS) < parts * K)
        i = tl.arange(0, K)
        tl.store(log_probability_ptr + row * k + i, score_of(key) - origin, mask=i < k)
        tl.store(id_ptr + row * k + i, tl.minimum(chosen, size - 1).to(tl.int64), mask=i < k)
        return
    for i in tl.static_range(K):
        best = tl.max(value, 0)
        chosen = tl.min(tl.where(value == best, index, size), 0)
        tl.store(log_probability_ptr + row * K + i, best - origin)
        tl.store(id_ptr + row * K + i, tl.minimum(chosen, size - 1).to(tl.int64))
        value = tl.where(index == chosen, float("-inf"), value)
        index = tl.where(index == chosen, size, index)


def topk_log_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `aerie.kernels.vocabulary.topk_log_softmax.topk_log_softmax`: return the k largest log-probabilities,
    best first, their columns, and logsumexp."""
    rows, size = logits.shape
    assert k <= MAX_K
    parts, device, by_sorting = triton.cdiv(size, BLOCK), logits.device, k > ONE_BY_ONE
    per_part = triton.next_power_of_2(k) if by_sorting else k
    values = torch.empty((rows, parts, per_part), dtype=torch.float32, device=device)
    indices = torch.empty((rows, parts, per_part), dtype=torch.int32, device=device)
    # Both must be aligned to 16 bytes, because Triton compiles another kernel for other alignments.
    count = triton.cdiv(rows * parts, ALIGNED) * ALIGNED
    tops, totals = torch.empty((2, count), dtype=torch.float32, device=device).unbind(0)
    best = torch.empty((rows, k), dtype=torch.float32, device=device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=device)
    norms = torch.empty(rows, dtype=torch.float32, device=device)
    _partial[(rows, parts)](
        logits, values, indices, tops, totals, size, logits.stride(0), per_part, BLOCK, by_sorting, num_warps=8
    )
    _combine[(rows,)](
        values,
        indices,
        tops,
        totals,
        best,
        ids,
        norms,
        parts,
        size,
        k,
        K=per_part,
        PARTS=triton.next_power_of_2(parts),
        COLUMNS=triton.next_power_of_2(parts * per_part),
        SORTED=by_sorting,
        num_warps=8 if by_sorting else 2,
    )
    return best, ids, norms


@triton.jit
def _partial_largest(x_ptr, value_ptr, index_ptr, size, row_stride, BLOCK: tl.constexpr):
    """Find the largest of a row's BLOCK columns.

    x_ptr: [rows, size] logits, row_stride between rows.
    value_ptr, index_ptr: [rows, parts], written: infinity for NaN, and the column.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * row_stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
    # tl.max ignores NaN, so NaN becomes infinity
    x = tl.where(x == x, x, float("inf"))
    best = tl.max(x, 0)
    # the smallest index among equals, as in torch on a CPU
    index = tl.min(tl.where(x == best, column, size), 0)
    part_row = row * tl.num_programs(1) + part
    tl.store(value_ptr + part_row, best)
    tl.store(index_ptr + part_row, index)


@triton.jit
def _combine_largest(value_ptr, index_ptr, best_ptr, out_ptr, parts, size, BROKEN: tl.constexpr, PARTS: tl.constexpr):
    """Choose a row's largest of all parts.

    value_ptr, index_ptr: [rows, parts], from `_partial_largest`; columns below `size`.
    best_ptr, out_ptr: [rows] float32 and int64, written: the largest value and its column.
    BROKEN: see `combine`. PARTS: parts, padded.
    """
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
    _combine_largest[(rows,)](
        values, indices, best, out, parts, size, BROKEN=broken, PARTS=triton.next_power_of_2(parts), num_warps=1
    )
    return best, out


def largest(logits: Tensor, checked: bool = False) -> tuple[Tensor, Tensor]:
    """Implement `aerie.kernels.vocabulary.topk_log_softmax.largest`: return each row's largest logit and its column,
    the smallest among equals.

    checked: rows with NaN or plus infinity return column NOT_FINITE.
    """
    rows, size = logits.shape
    parts = triton.cdiv(size, BLOCK)
    values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    indices = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    _partial_largest[(rows, parts)](logits, values, indices, size, logits.stride(0), BLOCK=BLOCK, num_warps=8)
    return combine(values, indices, size, NOT_FINITE if checked else 0)
