# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernels of experts with adapters, over cells: rows sorted by expert into blocks (`order_triton`). Between gate and up
projections and their activation the adapters' part is added."""

import triton
import triton.language as tl

from aerie.kernels.experts.gate_products_triton import activated, gates_of_pairs
from aerie.kernels.experts.order_triton import clear_counts
from aerie.kernels.fp8.rows_triton import scale_of
from aerie.kernels.kv.stored_values_triton import to_fp8


@triton.jit
def gate_up_of_cells(
    x_ptr,
    w_desc,
    x_scales_ptr,
    w_scales_ptr,
    bias_ptr,
    inner_ptr,
    pair_ptr,
    expert_ptr,
    count_ptr,
    row_step,
    group_step,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    IN_FP8: tl.constexpr,
    BY_GROUP: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the gate and up products of BLOCK_N columns for one block of cells.

    inner_ptr: [cells, 2 * WIDTH], written: gate, then up.
    Other arguments: `aerie.kernels.experts.sorted_rows_triton.gate_up_of_sorted_rows`, without shared experts.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    clear_counts(count_ptr, BINS, EXPERTS)
    block, tile = tl.program_id(0), tl.program_id(1)
    expert = tl.load(expert_ptr + tile)
    if expert < 0:
        return
    n, m = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    pair = tl.load(pair_ptr + tile * BLOCK_M + m)
    gate, up = gates_of_pairs(
        x_ptr, w_desc, x_scales_ptr, w_scales_ptr, pair, expert, block, row_step, group_step,
        SIZE, WIDTH, SLOTS, BLOCK_M, BLOCK_N, STEP, IN_FP8, BY_GROUP, WEIGHTS_FIRST, INTERPRETED,
    )  # fmt: skip
    if WEIGHTS_FIRST:
        gate, up = tl.trans(gate), tl.trans(up)
    there = n < WIDTH
    if bias_ptr is not None:
        biases = bias_ptr + expert * (2 * WIDTH) + n
        gate += tl.load(biases, mask=there, other=0.0).to(tl.float32)[None, :]
        up += tl.load(biases + WIDTH, mask=there, other=0.0).to(tl.float32)[None, :]
    to = inner_ptr + (tile * BLOCK_M + m).to(tl.int64)[:, None] * (2 * WIDTH) + n[None, :]
    mask = (pair >= 0)[:, None] & there[None, :]
    tl.store(to, gate.to(inner_ptr.dtype.element_ty), mask=mask)
    tl.store(to + WIDTH, up.to(inner_ptr.dtype.element_ty), mask=mask)


@triton.jit
def activate_cells(
    inner_ptr,
    hidden_ptr,
    values_ptr,
    factors_ptr,
    pair_ptr,
    expert_ptr,
    alpha,
    limit,
    shift,
    cubic,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PLAIN: tl.constexpr,
    CLAMPED: tl.constexpr,
    CUBED: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the activation of BLOCK_N columns for one block of cells.

    inner_ptr: [cells, 2 * WIDTH]: gate, then up.
    hidden_ptr: [cells, WIDTH], written; zeros for unused cells of blocks that have an expert.
    values_ptr, factors_ptr: the same in FP8, and its scales [blocks, WIDTH / BLOCK_N, BLOCK_M], written; or None.
    pair_ptr, expert_ptr: fields of `ExpertOrder`.
    alpha, limit, shift, cubic, PLAIN, CLAMPED, CUBED: as in `aerie.kernels.experts.gate_products_triton.activated`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, tile = tl.program_id(0), tl.program_id(1)
    if tl.load(expert_ptr + tile) < 0:
        return
    n, m = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    inside = tl.load(pair_ptr + tile * BLOCK_M + m) >= 0
    cell = (tile * BLOCK_M + m).to(tl.int64)[:, None]
    there = (n < WIDTH)[None, :]
    mask = inside[:, None] & there
    gates = inner_ptr + cell * (2 * WIDTH) + n[None, :]
    gate = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gates + WIDTH, mask=mask, other=0.0).to(tl.float32)
    hidden = activated(gate, up, alpha, limit, shift, cubic, PLAIN, CLAMPED, CUBED)
    tl.store(hidden_ptr + cell * WIDTH + n[None, :], hidden.to(hidden_ptr.dtype.element_ty), mask=there)
    if values_ptr is not None:
        scale = scale_of(hidden, 1)
        tl.store(factors_ptr + (tile * (WIDTH // BLOCK_N) + block) * BLOCK_M + m, scale)
        tl.store(values_ptr + cell * WIDTH + n[None, :], to_fp8(hidden / scale[:, None], INTERPRETED), mask=there)
