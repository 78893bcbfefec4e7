# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, index, assignment"
"""Kernels of `aerie.kernels.experts.few_rows_triton`. Weight tiles are the tensor core's first operand and fill its
64 rows; input rows are the second operand."""

import triton
import triton.language as tl

from aerie.kernels.experts.gate_products_triton import add_gates, scales_of_gates, times_channels
from aerie.kernels.fp8.rows_triton import scale_of
from aerie.kernels.gemm.splits_triton import comes_last, sum_of_splits
from aerie.kernels.kv.stored_values_triton import to_fp8


@triton.jit(do_not_specialize=["rows"])
def gate_up_of_few_rows(
    x_desc,
    w_desc,
    x_scales_ptr,
    w_scales_ptr,
    hidden_ptr,
    factor_ptr,
    chosen_ptr,
    weight_ptr,
    used_ptr,
    part_ptr,
    ticket_ptr,
    pair_ptr,
    rows,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    IN_FP8: tl.constexpr,
    BY_GROUP: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the gate and up products, activated, of BLOCK_N columns and one used expert, for all rows.

    x_desc, w_desc: tensor maps of x [rows, SIZE] and of the weights [experts * 2 * WIDTH, SIZE].
    x_scales_ptr, w_scales_ptr: their scales, with IN_FP8.
    hidden_ptr: [used experts, BLOCK_M, WIDTH], written: times the row's weight of the expert. In FP8 it is divided by a
        scale instead, and factor_ptr [used experts, WIDTH / BLOCK_N, BLOCK_M] gets scale x weight.
    chosen_ptr, weight_ptr: experts and weights of each row, SLOTS, padded to SLOTS_PADDED.
    used_ptr: used experts, then -1.
    part_ptr, ticket_ptr: sums of the SPLITS programs of a tile, which the last one adds, and a counter of each tile.
    pair_ptr: None, or for `down_of_sorted_rows`: gets the pairs of each expert's rows, and then activations are stored
        without weights.
    SIZE, WIDTH: numbers of x, and of the activation.
    STEP: columns of x per product.
    SPAN: products of a program.
    IN_FP8: x and weights are FP8; BY_GROUP: with scales per group; else per row and per output.
    """
    groups: tl.constexpr = SIZE // 128
    blocks: tl.constexpr = WIDTH // BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(1)
    expert = tl.load(used_ptr + tile)
    if expert < 0:
        return
    block, split = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    first = split * SPAN
    n, m = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    gate_row = expert * (2 * WIDTH) + block * BLOCK_N
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_scales, gate_scales, up_scales = x_scales_ptr, w_scales_ptr, w_scales_ptr
    x_scale, gate_scale, up_scale = 0.0, 0.0, 0.0
    if BY_GROUP:
        x_scales = x_scales_ptr + m * groups + first
        gate_scales, up_scales = scales_of_gates(w_scales_ptr, gate_row, first, BLOCK_N, WIDTH, groups)
        x_scale = tl.load(x_scales, mask=m < rows, other=0.0)
        gate_scale, up_scale = tl.load(gate_scales), tl.load(up_scales)
    for step in range(SPAN):
        column = (first + step) * STEP
        inputs = x_desc.load([0, column])
        gate, up, x_scale, gate_scale, up_scale = add_gates(
            gate, up, x_scale, gate_scale, up_scale, inputs, w_desc, gate_row, column,
            x_scales, gate_scales, up_scales, 1, m < rows, step, SPAN, WIDTH, IN_FP8, BY_GROUP, INTERPRETED,
        )  # fmt: skip
    if PDL:
        # Triggered only now, after all weights have arrived, because the down projections' reads would slow these
        # reads.
        tl.extra.cuda.gdc_launch_dependents()
    if SPLITS > 1:
        cell = tile * blocks + block
        # outputs of a row are adjacent; rows from `rows` on are neither written nor read
        there = (m < rows)[None, :]
        cells = part_ptr + cell * (SPLITS * 2 * BLOCK_N * BLOCK_M)
        cells += tl.arange(0, BLOCK_N)[:, None] + m[None, :] * BLOCK_N
        tl.store(cells + 2 * split * (BLOCK_N * BLOCK_M), gate, mask=there)
        tl.store(cells + (2 * split + 1) * (BLOCK_N * BLOCK_M), up, mask=there)
        if not comes_last(ticket_ptr + cell, SPLITS):
            return
        gate = sum_of_splits(cells, there, 2 * BLOCK_N * BLOCK_M, SPLITS)
        up = sum_of_splits(cells + BLOCK_N * BLOCK_M, there, 2 * BLOCK_N * BLOCK_M, SPLITS)
    if IN_FP8 and not BY_GROUP:
        x_scale = tl.load(x_scales_ptr + m, mask=m < rows, other=0.0)
        gate, up = times_channels(gate, up, x_scale, w_scales_ptr + expert * (2 * WIDTH) + n, WIDTH)
    slot = tl.arange(0, SLOTS_PADDED)
    pair = m[:, None] * SLOTS + slot[None, :]
    asked = tl.load(chosen_ptr + pair, mask=(m < rows)[:, None] & (slot < SLOTS)[None, :], other=-1) == expert
    share = tl.sum(tl.load(weight_ptr + pair, mask=asked, other=0.0), 1)
    anybody = tl.max(asked.to(tl.int32), 1) > 0
    if pair_ptr is not None:
        share = tl.full([BLOCK_M], 1.0, tl.float32)
        if block == 0:
            tl.store(pair_ptr + tile * BLOCK_M + m, tl.max(tl.where(asked, pair, -1), 1))
    hidden = tl.where(anybody[None, :], gate / (1.0 + tl.exp(-gate)) * up, 0.0)
    at = (tile * BLOCK_M + m).to(tl.int64)
    if IN_FP8:
        scale = scale_of(hidden, 0)
        tl.store(factor_ptr + (tile * blocks + block) * BLOCK_M + m, scale * share)
        tl.store(hidden_ptr + at[None, :] * WIDTH + n[:, None], to_fp8(hidden / scale[None, :], INTERPRETED))
    else:
        hidden = (hidden * share[None, :]).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + at[None, :] * WIDTH + n[:, None], hidden)


@triton.jit
def _factor_and_scale(
    factor_ptr,
    w_scales_ptr,
    expert,
    tile,
    step,
    n,
    m,
    STEPS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STEP: tl.constexpr,
    BY_GROUP: tl.constexpr,
):
    """Return the row factors [BLOCK_M] and the scales of outputs `n`, for one step of an expert."""
    factor = tl.load(factor_ptr + (tile * STEPS + step) * BLOCK_M + m)
    scale_index = (expert * (SIZE // 64) + n // 64) * GROUPS + step * STEP // 128 if BY_GROUP else expert * SIZE + n
    return factor, tl.load(w_scales_ptr + scale_index)


@triton.jit(do_not_specialize=["rows", "max_used"])
def down_of_few_rows(
    hidden_desc,
    w_desc,
    factor_ptr,
    w_scales_ptr,
    out_ptr,
    used_ptr,
    num_used_ptr,
    part_ptr,
    ticket_ptr,
    rows,
    max_used,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    IN_FP8: tl.constexpr,
    BY_GROUP: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the weighted sum of the down projections of a block of BLOCK_N outputs, for all rows. A program adds the
    used experts of its split, one of every SPLITS; the last program adds the splits.

    hidden_desc: [used experts * BLOCK_M, WIDTH] from `gate_up_of_few_rows`.
    factor_ptr, w_scales_ptr: in FP8, factors of rows (scales and routing weights), and scales of the weights.
    used_ptr, num_used_ptr: the used experts and their number; max_used: the array's size.
    part_ptr, ticket_ptr: sums and counters of the splits.
    """
    steps: tl.constexpr = WIDTH // STEP
    groups: tl.constexpr = WIDTH // 128
    block, split = tl.program_id(0), tl.program_id(1)
    n, m = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_expert = tl.maximum(tl.load(used_ptr + split, mask=split < max_used, other=0), 0)
    mine = (tl.load(num_used_ptr) - split + SPLITS - 1) // SPLITS
    w_ahead = w_desc.load([first_expert * SIZE + block * BLOCK_N, 0])
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Experts and scales are read one step ahead, so that weight tiles are already in flight.
    last = tl.maximum(mine * steps - 1, 0)
    tile = split + tl.minimum(1, last) // steps * SPLITS
    expert = tl.maximum(tl.load(used_ptr + tile, mask=tile < max_used, other=0), 0)
    factor, scale, factor_ahead, scale_ahead = 0.0, 0.0, 0.0, 0.0
    if IN_FP8:
        first = tl.where(split < max_used, split, 0)
        factor_ahead, scale_ahead = _factor_and_scale(
            factor_ptr, w_scales_ptr, first_expert, first, 0, n, m, steps, groups, SIZE, BLOCK_M, STEP, BY_GROUP
        )
        tile = tl.where(tile < max_used, tile, 0)
        factor, scale = _factor_and_scale(
            factor_ptr, w_scales_ptr, expert, tile, 1 % steps, n, m, steps, groups, SIZE, BLOCK_M, STEP, BY_GROUP
        )
    for i in range(1, mine * steps):
        tile, step = split + i // steps * SPLITS, i % steps
        weights = w_desc.load([expert * SIZE + block * BLOCK_N, step * STEP])
        inputs = hidden_desc.load([tile * BLOCK_M, step * STEP])
        following = tl.minimum(i + 1, last)
        next_expert = tl.load(used_ptr + split + following // steps * SPLITS)
        if IN_FP8:
            next_factor, next_scale = _factor_and_scale(
                factor_ptr,
                w_scales_ptr,
                next_expert,
                split + following // steps * SPLITS,
                following % steps,
                n,
                m,
                steps,
                groups,
                SIZE,
                BLOCK_M,
                STEP,
                BY_GROUP,
            )
            acc += tl.dot(weights, tl.trans(inputs)) * (scale[:, None] * factor[None, :])
            factor, scale = next_factor, next_scale
        else:
            if INTERPRETED:
                weights, inputs = weights.to(tl.float32), inputs.to(tl.float32)
            acc = tl.dot(weights, tl.trans(inputs), acc)
        expert = next_expert
    if mine > 0:  # the first step, computed last so that the loop's reads start earlier
        inputs = hidden_desc.load([split * BLOCK_M, 0])
        if IN_FP8:
            acc += tl.dot(w_ahead, tl.trans(inputs)) * (scale_ahead[:, None] * factor_ahead[None, :])
        else:
            if INTERPRETED:
                w_ahead, inputs = w_ahead.to(tl.float32), inputs.to(tl.float32)
            acc = tl.dot(w_ahead, tl.trans(inputs), acc)
    if SPLITS > 1:
        there = (m < rows)[None, :]
        cells = part_ptr + block * (SPLITS * BLOCK_N * BLOCK_M) + tl.arange(0, BLOCK_N)[:, None] + m[None, :] * BLOCK_N
        tl.store(cells + split * (BLOCK_N * BLOCK_M), acc, mask=there)
        if not comes_last(ticket_ptr + block, SPLITS):
            return
        acc = sum_of_splits(cells, there, BLOCK_N * BLOCK_M, SPLITS)
    out = out_ptr + m.to(tl.int64)[None, :] * SIZE + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[None, :])


@triton.jit
def down_of_one_row(
    w_desc,
    hidden_ptr,
    factor_ptr,
    w_scales_ptr,
    out_ptr,
    used_ptr,
    num_used_ptr,
    part_ptr,
    ticket_ptr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    IN_FP8: tl.constexpr,
    BY_GROUP: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """`down_of_few_rows` for one row. A program computes BLOCK_N outputs of one expert and reads all of its weights
    before the wait. In FP8 the row becomes several operand columns: column g has the row's values of scale group g, and
    zeros elsewhere, as in `aerie.kernels.fp8.gemm_ahead_triton`.

    w_desc: tensor map of the down weights [experts * SIZE, WIDTH].
    hidden_ptr, factor_ptr: from `gate_up_of_few_rows`; the first of each expert's BLOCK_M rows is read.
    w_scales_ptr: scales of the weights, with IN_FP8.
    out_ptr: [SIZE], written.
    used_ptr, num_used_ptr: used experts, then -1; their number.
    part_ptr, ticket_ptr: float32 results of the SPLITS experts, and a counter of each block; zero between launches.
    """
    groups: tl.constexpr = WIDTH // 128 if IN_FP8 else 1
    block, tile = tl.program_id(0), tl.program_id(1)
    n, column, k = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, 16), tl.arange(0, WIDTH)
    group = tl.minimum(column, groups - 1)
    own = (k // 128 if IN_FP8 else k * 0)[None, :] == column[:, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    is_used = tile < tl.load(num_used_ptr)
    expert = tl.maximum(tl.load(used_ptr + tile), 0)
    weights = w_desc.load([expert * SIZE + block * BLOCK_N, 0])
    if not IN_FP8:
        scales = 1.0
    elif BY_GROUP:
        scales = tl.load(w_scales_ptr + ((expert * (SIZE // 64) + n // 64) * groups)[:, None] + group[None, :])
    else:
        scales = tl.load(w_scales_ptr + (expert * SIZE + n)[:, None] + group[None, :] * 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    there = own & is_used  # activations of unused experts are uninitialised
    x_row = hidden_ptr + (tile * (BLOCK_M * WIDTH) + k)[None, :]
    x = tl.load(x_row + column[:, None] * 0, mask=there, other=0.0)
    if IN_FP8:
        has_factor = (column < groups) & is_used
        factor = tl.load(factor_ptr + (tile * groups + column) * BLOCK_M, mask=has_factor, other=0.0)
        y = tl.sum(tl.dot(weights, tl.trans(x)) * (scales * factor[None, :]), 1)
    else:
        if INTERPRETED:
            weights, x = weights.to(tl.float32), x.to(tl.float32)
        y = tl.sum(tl.dot(weights, tl.trans(x)), 1)
    if SPLITS > 1:
        cells = part_ptr + block * (SPLITS * BLOCK_N) + tl.arange(0, BLOCK_N)
        tl.store(cells + tile * BLOCK_N, y)
        if not comes_last(ticket_ptr + block, SPLITS):
            return
        y = sum_of_splits(cells, None, BLOCK_N, SPLITS)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty))
