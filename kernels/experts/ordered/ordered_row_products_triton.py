# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Kernels of `ordered_rows_triton` for one row and weights in FP8 with scales per group. They add in the order of
`aerie.kernels.experts.sorted_rows_triton`.

A sum over groups must add one group after another, and the tensor core multiplies at least 16 operand columns, of which
one row would use only one. So the row becomes 16 columns: column g has the row's values of group g, and zeros
elsewhere. One product then returns the sums of up to 16 groups apart (see `aerie.kernels.fp8.gemm_ahead_triton`)."""

import triton
import triton.language as tl

from aerie.kernels.fp8.rows_triton import scale_of
from aerie.kernels.gemm.splits_triton import comes_last, sum_of_splits
from aerie.kernels.kv.stored_values_triton import to_fp8

_COLUMNS = tl.constexpr(16)  # operand columns of the smallest product


@triton.jit
def _column(product, column, AT: tl.constexpr):
    """Return column AT of product [outputs, columns]."""
    return tl.sum(tl.where((column == AT)[None, :], product, 0.0), 1)


@triton.jit
def gate_up_of_ordered_row(
    x_ptr,
    w_desc,
    x_scales_ptr,
    w_scales_ptr,
    hidden_ptr,
    hidden_scales_ptr,
    chosen_ptr,
    part_ptr,
    ticket_ptr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the activated gate and up products of 64 columns and one of the row's experts. A program computes the gate
    products or the up products; the second of the two to finish activates them.

    x_ptr: [SIZE].
    x_scales_ptr: [SIZE / 128].
    hidden_ptr: [experts, WIDTH], in FP8.
    hidden_scales_ptr: [experts, WIDTH / 64].
    chosen_ptr: experts of the row; negative: none.
    part_ptr: sums of the two programs.
    TOGETHER: groups of 128 inputs per product.
    """
    groups: tl.constexpr = SIZE // 128
    blocks: tl.constexpr = WIDTH // 64
    if PDL:
        tl.extra.cuda.gdc_wait()
    tile, half, block = tl.program_id(1), tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert = tl.load(chosen_ptr + tile)
    if expert < 0:
        return
    row = expert * (2 * WIDTH) + half * WIDTH + block * 64
    n, column, k = tl.arange(0, 64), tl.arange(0, _COLUMNS), tl.arange(0, TOGETHER * 128)
    own = (k // 128)[None, :] == column[:, None]
    x_columns = x_ptr + k[None, :] + column[:, None] * 0
    w_scales = w_scales_ptr + row // 64 * groups
    acc = tl.zeros([64], tl.float32)
    for first in range(0, groups, TOGETHER):
        scales = ()
        for at in tl.static_range(TOGETHER):
            scales = scales + (tl.load(w_scales + first + at) * tl.load(x_scales_ptr + first + at),)
        weights = w_desc.load([row, first * 128])
        inputs = tl.load(x_columns + first * 128, mask=own, other=0.0)
        product = tl.dot(weights, tl.trans(inputs))
        for at in tl.static_range(TOGETHER):
            acc += _column(product, column, at) * scales[at]
    if PDL:
        # Triggered only now, as in `few_row_products_triton`: the down projections' reads would slow these reads.
        tl.extra.cuda.gdc_launch_dependents()
    cells = part_ptr + (tile * blocks + block) * 128 + n
    tl.store(cells + half * 64, acc)
    if not comes_last(ticket_ptr + tile * blocks + block, 2):
        return
    gate, up = tl.load(cells, cache_modifier=".cg"), tl.load(cells + 64, cache_modifier=".cg")
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    scale = scale_of(hidden, 0)
    tl.store(hidden_scales_ptr + tile * blocks + block, scale)
    tl.store(hidden_ptr + tile * WIDTH + block * 64 + n, to_fp8(hidden / scale, INTERPRETED))


@triton.jit
def down_of_ordered_row(
    w_desc,
    hidden_ptr,
    hidden_scales_ptr,
    w_scales_ptr,
    out_ptr,
    chosen_ptr,
    weight_ptr,
    part_ptr,
    ticket_ptr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write BLOCK_N columns of the weighted sum of the down projections of one row. A program computes one of the row's
    SLOTS experts, and reads all of its weights before the wait; the last to finish adds them in the order of slots.

    w_desc, w_scales_ptr: tensor map of the weights [experts * SIZE, WIDTH], FP8, and their scales per 64 x 128 block.
    hidden_ptr, hidden_scales_ptr: [SLOTS, WIDTH] FP8 inner activations, and their scales per 64.
    out_ptr: [SIZE], written.
    chosen_ptr, weight_ptr: [SLOTS] the row's experts, -1 for none, and their routing weights.
    part_ptr: float32 results of the experts, rounded to out_ptr's dtype.
    ticket_ptr: counters of programs that are done.
    """
    groups: tl.constexpr = WIDTH // 64
    block, tile = tl.program_id(0), tl.program_id(1)
    n, column, k = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, _COLUMNS), tl.arange(0, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    chosen, share = tl.load(chosen_ptr + tile), tl.load(weight_ptr + tile)
    is_used, expert = chosen >= 0, tl.maximum(chosen, 0)
    weights = w_desc.load([expert * SIZE + block * BLOCK_N, 0])
    w_scales = w_scales_ptr + (expert * (SIZE // 64) + n // 64) * (WIDTH // 128)
    scales = ()
    for at in tl.static_range(WIDTH // 128):
        scales = scales + (tl.load(w_scales + at),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    own = (k // 64)[None, :] == column[:, None]
    x = tl.load(hidden_ptr + tile * WIDTH + k[None, :] + column[:, None] * 0, mask=own & is_used, other=0.0)
    product = tl.dot(weights, tl.trans(x))
    acc = tl.zeros([BLOCK_N], tl.float32)
    for at in tl.static_range(groups):
        factor = tl.load(hidden_scales_ptr + tile * groups + at, mask=is_used, other=0.0) * share
        acc += _column(product, column, at) * (scales[at // 2] * factor)
    cells = part_ptr + block * (SLOTS * BLOCK_N) + tl.arange(0, BLOCK_N)
    tl.store(cells + tile * BLOCK_N, acc.to(out_ptr.dtype.element_ty).to(tl.float32))
    if not comes_last(ticket_ptr + block, SLOTS):
        return
    tl.store(out_ptr + n, sum_of_splits(cells, None, BLOCK_N, SLOTS).to(out_ptr.dtype.element_ty))
