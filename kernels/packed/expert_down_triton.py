# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Down projections of `aerie.kernels.packed.experts_triton`, over the inner activations of `expert_gate_up_triton`,
with the same blocks and lanes."""

import triton
import triton.language as tl

from aerie.kernels.gemm.splits_triton import comes_last, sum_of_splits
from aerie.kernels.packed.expert_steps_triton import (
    add_products,
    load_inputs,
    load_weight,
    restored,
    words,
    zero_sums,
)
from aerie.kernels.packed.sums_triton import sums_of_warps


@triton.jit
def _add_biases(
    total,
    bias_ptr,
    share_ptr,
    used_ptr,
    split,
    max_used,
    m,
    n,
    live,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Return `total` plus the weighted biases of every SPLITS-th used expert, from number `split` on.

    bias_ptr, share_ptr, used_ptr, max_used, SIZE: as in `down_of_listed`.
    m, n, live: row and output of each element of `total`, and whether it exists.
    Processes four experts at a time, so that their reads overlap.
    """
    for first in range(split, max_used, 4 * SPLITS):
        for each in tl.static_range(4):
            block = first + each * SPLITS
            expert = tl.load(used_ptr + block, mask=block < max_used, other=-1)
            there = live & (expert >= 0)
            bias = tl.load(bias_ptr + tl.maximum(expert, 0) * SIZE + n, mask=there, other=0.0)
            total += bias * tl.load(share_ptr + block * 8 + m, mask=there, other=0.0)
    return total


@triton.jit(do_not_specialize=["rows", "max_used"])
def down_of_listed(
    hidden_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    share_ptr,
    out_ptr,
    used_ptr,
    num_used_ptr,
    part_ptr,
    ticket_ptr,
    rows,
    max_used,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    WARPS_N: tl.constexpr,
    WARPS_K: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    CODE: tl.constexpr,
    SCALES: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the weighted sum of down projections to out [rows, SIZE], of at most 8 rows. A program computes some
    outputs of every SPLITS-th used expert. It may read its first weights and biases before the wait, because the
    previous kernel is a fence (`aerie.kernels.pdl`).

    hidden_ptr: [used experts, 8, WIDTH] inner activations times routing weights, from `gate_up_of_blocks`.
    codes_ptr, scales_ptr, zeros_ptr, GROUP, CODE: the weight, see `aerie.kernels.packed.weight.PackedWeight`.
    bias_ptr: [experts, SIZE], or None.
    share_ptr: [used experts, 8] float32 routing weights, which weight the bias.
    out_ptr: [rows, SIZE], written.
    used_ptr, num_used_ptr: [max_used] used experts, then NO_EXPERT; their number.
    part_ptr, ticket_ptr: float32 sums of the SPLITS programs of an output, which the last one adds, and their counters.
    WIDTH, SIZE: inputs and outputs of the projection.
    WARPS_N, WARPS_K: warps of a program beside each other in outputs and in inputs; STEPS: their steps per expert.
    STAGES: steps that weights are loaded ahead.
    SCALES: see `expert_steps_triton.add_products`.
    TYPE, SCALE_TYPE: dtypes of operands and of scales.
    PDL: launch before the previous kernel ends.
    INTERPRETED: run by Triton's interpreter, without PTX.

    Steps: load the first bias; for each used expert and 64 inputs, load weights and inputs, and add products; add the
    sums of the warps; add the weighted biases; add the SPLITS programs' sums. `fragments_triton` describes how lanes
    (t, g) and registers (r) share a tile.
    """
    CHUNKS: tl.constexpr = WIDTH // 64
    GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    PIECES: tl.constexpr = 2 if CODE == "int8" else 1
    TILES: tl.constexpr = (SIZE + 63) // 64
    PARTS: tl.constexpr = 4
    WARPS: tl.constexpr = WARPS_N * WARPS_K
    tile, split = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, WARPS * 128)
    warp, r, t, g = index // 128, index % 4, index // 4 % 4, index // 16 % 8
    n_tile = tile * WARPS_N + warp % WARPS_N
    weight_tile = tl.minimum(n_tile, TILES - 1)
    x_at = g * (WIDTH // 2) + 4 * t + r
    codes_at, scales_at = weight_tile * (CHUNKS * 512 * PIECES), weight_tile * (GROUPS * 32) + g * 4 + r
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_used = tl.load(num_used_ptr)
    steps = (num_used - split + SPLITS - 1) // SPLITS * STEPS
    # an expert's index is read one step before its use
    expert = tl.maximum(tl.load(used_ptr + split, mask=split < max_used, other=0), 0)
    first_bias = ()
    if bias_ptr is not None:
        is_used = tl.load(used_ptr + split, mask=split < max_used, other=-1) >= 0
        for q in tl.static_range((PARTS + WARPS_K - 1) // WARPS_K):
            part = q * WARPS_K + warp // WARPS_N
            n = n_tile * 64 + part * 16 + r // 2 * 8 + g
            live = is_used & (part < PARTS) & (n < SIZE)
            first_bias = first_bias + (tl.load(bias_ptr + expert * SIZE + n, mask=live, other=0.0),)
    acc = zero_sums(PARTS, WARPS * 128)
    inputs_ahead = ()
    for _ in tl.static_range(2):
        inputs_ahead = inputs_ahead + (tl.zeros([WARPS * 128], tl.int32),)
    for i in tl.range(0, steps, num_stages=STAGES):
        block, chunk = split + i // STEPS * SPLITS, i % STEPS * WARPS_K + warp // WARPS_N
        whole = expert.to(tl.int64) * TILES
        zeros_base = zeros_ptr
        if zeros_ptr is not None:
            zeros_base = words(zeros_ptr) + whole * (GROUPS * 32) + scales_at
        loaded = load_weight(
            codes_ptr + whole * (CHUNKS * 512 * PIECES) + codes_at,
            words(scales_ptr) + whole * (GROUPS * 32) + scales_at, zeros_base, chunk, index, CHUNKS, GROUP,
            PIECES,
        )  # fmt: skip
        expert = tl.load(used_ptr + split + tl.minimum(i + 1, steps - 1) // STEPS * SPLITS)
        # inputs are also read one step ahead; the first ones after the weights, because they must wait
        next_block = split + (i + 1) // STEPS * SPLITS
        next_chunk = (i + 1) % STEPS * WARPS_K + warp // WARPS_N
        x_base = words(hidden_ptr) + block * (4 * WIDTH) + x_at
        next_x_base = x_base + (next_block - block) * (4 * WIDTH)
        is_first, has_next = (g < rows) & (i == 0), (g < rows) & (i + 1 < steps)
        inputs, waits = (), i == 0 if PDL else None
        first_inputs = load_inputs((x_base,), (is_first,), waits, chunk, t, WIDTH, 1, INTERPRETED)
        for each in tl.static_range(2):
            inputs = inputs + (tl.where(i == 0, first_inputs[each], inputs_ahead[each]),)
        inputs_ahead = load_inputs(
            (next_x_base,), (has_next,), None, next_chunk, t, WIDTH, 1, INTERPRETED
        )  # fmt: skip
        acc = add_products(
            acc, loaded, inputs, GROUP, 1, zeros_ptr is not None, CODE, SCALES, TYPE, SCALE_TYPE, INTERPRETED
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()  # programs without an expert must wait, too
    # as in `expert_gate_up_triton.gate_up_of_blocks`
    sums = sums_of_warps(acc, PARTS, WARPS_N, WARPS_K, False, INTERPRETED)
    RESULTS: tl.constexpr = (PARTS + WARPS_K - 1) // WARPS_K
    total = ()
    for q in tl.static_range(RESULTS):
        part = q * WARPS_K + warp // WARPS_N
        m, n = 2 * t + r % 2, n_tile * 64 + part * 16 + r // 2 * 8 + g
        one = restored(sums[q], CODE, SCALES, 1)
        if bias_ptr is not None:
            live = (part < PARTS) & (m < rows) & (n < SIZE)
            # programs without an expert load uninitialised routing weights, and discard them
            share = tl.load(share_ptr + split * 8 + m, mask=live & (split < num_used), other=0.0)
            one = _add_biases(
                one + first_bias[q] * share, bias_ptr, share_ptr, used_ptr, split + SPLITS, max_used, m, n, live, SIZE,
                SPLITS,
            )  # fmt: skip
        total = total + (one,)
    cells = part_ptr
    if SPLITS > 1:
        cells = part_ptr + tile * (SPLITS * PARTS * WARPS_N * 128) + index % 128
        for q in tl.static_range(RESULTS):
            part = q * WARPS_K + warp // WARPS_N
            here = cells + ((split * PARTS + part) * WARPS_N + warp % WARPS_N) * 128
            tl.store(here, total[q], mask=(part < PARTS) & (2 * t < rows))
        if not comes_last(ticket_ptr + tile, SPLITS):
            return
    for q in tl.static_range(RESULTS):
        part = q * WARPS_K + warp // WARPS_N
        m, n = 2 * t + r % 2, n_tile * 64 + part * 16 + r // 2 * 8 + g
        live = (part < PARTS) & (m < rows) & (n < SIZE)
        if SPLITS > 1:
            here = cells + (part * WARPS_N + warp % WARPS_N) * 128
            result = sum_of_splits(here, live, PARTS * WARPS_N * 128, SPLITS)
        else:
            result = total[q]
        tl.store(out_ptr + m.to(tl.int64) * SIZE + n, result.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["first_tile"])
def down_of_blocks(
    hidden_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    row_scale_ptr,
    bias_ptr,
    part_ptr,
    weight_ptr,
    pair_ptr,
    expert_ptr,
    first_tile,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_TILES: tl.constexpr,
    WARPS_N: tl.constexpr,
    WARPS_K: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    CODE: tl.constexpr,
    SCALES: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write weighted down projections of one block of rows sorted by expert: SPAN outputs from 64 * first_tile on.

    hidden_ptr: [blocks, 8 * ROW_TILES, WIDTH] inner activations, from `gate_up_of_blocks`.
    codes_ptr, scales_ptr, zeros_ptr, GROUP, CODE: the weight, see `aerie.kernels.packed.weight.PackedWeight`.
    row_scale_ptr, bias_ptr: [experts, SIZE], factor on each output and bias; None without.
    part_ptr: [rows * slots, SPAN], written.
    weight_ptr: [rows * slots] routing weights.
    pair_ptr: (row, slot) pair of each of a block's rows, -1 for none.
    expert_ptr: expert of each block, -1 for unused blocks.
    WARPS_N, WARPS_K, STEPS, STAGES, SCALES, TYPE, SCALE_TYPE, PDL, INTERPRETED: as in `down_of_listed`.
    """
    CHUNKS: tl.constexpr = WIDTH // 64
    GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    PIECES: tl.constexpr = 2 if CODE == "int8" else 1
    TILES: tl.constexpr = (SIZE + 63) // 64
    BLOCK_M: tl.constexpr = 8 * ROW_TILES
    PARTS: tl.constexpr = 4 * ROW_TILES
    WARPS: tl.constexpr = WARPS_N * WARPS_K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert < 0:
        return
    index = tl.arange(0, WARPS * 128)
    warp, r, t, g = index // 128, index % 4, index // 4 % 4, index // 16 % 8
    n_tile = first_tile + tl.program_id(0) * WARPS_N + warp % WARPS_N
    n_block = expert.to(tl.int64) * TILES + tl.minimum(n_tile, TILES - 1)
    codes_base = codes_ptr + n_block * (CHUNKS * 512 * PIECES)
    scales_base = words(scales_ptr) + n_block * (GROUPS * 32) + g * 4 + r
    zeros_base = zeros_ptr
    if zeros_ptr is not None:
        zeros_base = words(zeros_ptr) + n_block * (GROUPS * 32) + g * 4 + r
    x_base, rows_there = (), ()
    for j in tl.static_range(ROW_TILES):
        row = block * BLOCK_M + g + 8 * j
        x_base = x_base + (words(hidden_ptr) + row.to(tl.int64) * (WIDTH // 2) + 4 * t + r,)
        rows_there = rows_there + (tl.load(pair_ptr + row) >= 0,)
    acc = zero_sums(PARTS, WARPS * 128)
    first = warp // WARPS_N
    inputs = load_inputs(x_base, rows_there, None, first, t, WIDTH, ROW_TILES, INTERPRETED)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        chunk = first + step * WARPS_K
        loaded = load_weight(codes_base, scales_base, zeros_base, chunk, index, CHUNKS, GROUP, PIECES)
        following = load_inputs(
            x_base, rows_there, None, chunk + WARPS_K, t, WIDTH, ROW_TILES, INTERPRETED
        )  # fmt: skip
        acc = add_products(
            acc, loaded, inputs, GROUP, ROW_TILES, zeros_ptr is not None, CODE, SCALES, TYPE, SCALE_TYPE, INTERPRETED
        )  # fmt: skip
        inputs = following
    # as in `expert_gate_up_triton.gate_up_of_blocks`
    sums = sums_of_warps(acc, PARTS, WARPS_N, WARPS_K, False, INTERPRETED)
    for q in tl.static_range((PARTS + WARPS_K - 1) // WARPS_K):
        part = q * WARPS_K + warp // WARPS_N
        m, n = part % ROW_TILES * 8 + 2 * t + r % 2, n_tile * 64 + part // ROW_TILES * 16 + r // 2 * 8 + g
        pair = tl.load(pair_ptr + block * BLOCK_M + m, mask=part < PARTS, other=-1)
        live = (pair >= 0) & (n < SIZE) & (n - first_tile * 64 < SPAN)
        total = restored(sums[q], CODE, SCALES, ROW_TILES)
        if row_scale_ptr is not None:
            total *= tl.load(row_scale_ptr + expert * SIZE + n, mask=live, other=0.0)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + expert * SIZE + n, mask=live, other=0.0)
        total *= tl.load(weight_ptr + pair, mask=live, other=0.0)
        out = part_ptr + pair.to(tl.int64) * SPAN + n - first_tile * 64
        tl.store(out, total.to(part_ptr.dtype.element_ty), mask=live)
