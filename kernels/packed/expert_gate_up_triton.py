# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Gate and up projections of `aerie.kernels.packed.experts_triton`. Each lane loads its own part of the operands,
as in `aerie.kernels.packed.stream_triton`. Codes and scales are copied to shared memory some steps ahead.

A block has rows of one expert. Few rows: one block of all rows per used expert (LISTED). More rows: blocks sorted by
expert (`aerie.kernels.experts.order_triton`).
"""

import triton
import triton.language as tl

from aerie.kernels.experts.gate_products_triton import activated
from aerie.kernels.experts.order_triton import clear_counts
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


@triton.jit(do_not_specialize=["rows"])
def gate_up_of_blocks(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    row_scale_ptr,
    bias_ptr,
    down_scale_ptr,
    hidden_ptr,
    share_ptr,
    chosen_ptr,
    weight_ptr,
    expert_ptr,
    pair_ptr,
    count_ptr,
    part_ptr,
    ticket_ptr,
    rows,
    x_words,
    alpha,
    limit,
    shift,
    cubic,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    WARPS_K: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    LISTED: tl.constexpr,
    CLAMPED: tl.constexpr,
    CUBED: tl.constexpr,
    RAW: tl.constexpr,
    CODE: tl.constexpr,
    SCALES: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write the inner activations of each block to hidden_ptr: [blocks, 8 * ROW_TILES, WIDTH].

    x_ptr: [rows, SIZE], x_words 32-bit words between rows.
    codes_ptr to row_scale_ptr, GROUP, CODE: the weight, see `aerie.kernels.packed.weight.PackedWeight`.
    bias_ptr: [experts, 2 * WIDTH], or None.
    expert_ptr: expert of each block, -1 for unused blocks.
    LISTED: the activations are multiplied by each row's routing weight of the expert, which is zero for rows that do
        not use it. These weights are stored at `share_ptr`. down_scale_ptr: [experts] factors on them, or None.
        chosen_ptr, weight_ptr: [rows, SLOTS] experts of each row, and their routing weights.
    Else pair_ptr: (row, slot) pair of each of a block's rows, -1 for none. count_ptr: BINS counts of
        `order_by_expert`, of which those of the EXPERTS are cleared.
    part_ptr, ticket_ptr: float32 sums of the SPLITS programs of an output, which the last one adds, and their counters.
    alpha, limit, shift, cubic, CLAMPED, CUBED: the activation.
    RAW: write gate and up themselves to hidden_ptr, [blocks, 8 * ROW_TILES, 2 * WIDTH]; not if LISTED.
    WARPS_K, STEPS: warps of a program beside each other in inputs, and their steps.
    STAGES, SCALES, TYPE, SCALE_TYPE, PDL, INTERPRETED: as in `expert_down_triton.down_of_listed`.
    """
    CHUNKS: tl.constexpr = (SIZE + 63) // 64
    GROUPS: tl.constexpr = (CHUNKS * 64 + GROUP - 1) // GROUP
    PIECES: tl.constexpr = 2 if CODE == "int8" else 1
    TILES: tl.constexpr = WIDTH // 64
    BLOCK_M: tl.constexpr = 8 * ROW_TILES
    PARTS: tl.constexpr = 4 * ROW_TILES
    WARPS: tl.constexpr = 2 * WARPS_K
    if PDL:
        if not LISTED:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if not LISTED:
        clear_counts(count_ptr, BINS, EXPERTS)
    tile, split, block = tl.program_id(0) % TILES, tl.program_id(0) // TILES, tl.program_id(1)
    expert = tl.load(expert_ptr + block)
    if expert < 0:
        return
    index = tl.arange(0, WARPS * 128)
    warp, r, t, g = index // 128, index % 4, index // 4 % 4, index // 16 % 8
    n_block = (expert * 2).to(tl.int64) * TILES + tile + warp % 2 * TILES
    codes_base = codes_ptr + n_block * (CHUNKS * 512 * PIECES)
    scales_base = words(scales_ptr) + n_block * (GROUPS * 32) + g * 4 + r
    zeros_base = zeros_ptr
    if zeros_ptr is not None:
        zeros_base = words(zeros_ptr) + n_block * (GROUPS * 32) + g * 4 + r
    x_base, rows_there = (), ()
    for j in tl.static_range(ROW_TILES):
        row, there = g + 8 * j, g + 8 * j < rows
        if not LISTED:
            pair = tl.load(pair_ptr + block * BLOCK_M + g + 8 * j)
            row, there = tl.maximum(pair, 0) // SLOTS, pair >= 0
        x_base = x_base + (words(x_ptr) + row.to(tl.int64) * x_words + 4 * t + r,)
        rows_there = rows_there + (there,)
    first = split * STEPS * WARPS_K + warp // 2
    gate_bias, up_bias, factor, uses = 0.0, 0.0, 0.0, False
    if LISTED:
        tl.static_assert(PARTS <= WARPS)
        n = tile * 64 + warp // ROW_TILES * 16 + r // 2 * 8 + g
        at = expert * (2 * WIDTH) + n
        if bias_ptr is not None:
            gate_bias = tl.load(bias_ptr + at, mask=warp < PARTS, other=0.0)
            up_bias = tl.load(bias_ptr + at + WIDTH, mask=warp < PARTS, other=0.0)
        factor, uses = _share(chosen_ptr, weight_ptr, expert, warp % ROW_TILES * 8 + 2 * t + r % 2, rows, SLOTS)
    acc = zero_sums(PARTS, WARPS * 128)
    inputs = load_inputs(x_base, rows_there, None, first, t, SIZE, ROW_TILES, INTERPRETED)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        chunk = first + step * WARPS_K
        loaded = load_weight(codes_base, scales_base, zeros_base, chunk, index, CHUNKS, GROUP, PIECES)
        following = load_inputs(
            x_base, rows_there, None, chunk + WARPS_K, t, SIZE, ROW_TILES, INTERPRETED
        )  # fmt: skip
        acc = add_products(
            acc, loaded, inputs, GROUP, ROW_TILES, zeros_ptr is not None, CODE, SCALES, TYPE, SCALE_TYPE, INTERPRETED
        )  # fmt: skip
        inputs = following
    if PDL and LISTED:
        tl.extra.cuda.gdc_launch_dependents()  # only now, because the down projections' reads would slow these reads
    # part ROW_TILES i + j of a sum, lane (g, t), register r: output 16 i + 8 (r / 2) + g of row 8 j + 2 t + r % 2
    sums = sums_of_warps(acc, PARTS, 2, WARPS_K, SPLITS == 1, INTERPRETED)
    place, word = block * TILES + tile, index % 128
    cells = part_ptr
    if SPLITS > 1:
        cells = part_ptr + place * (SPLITS * PARTS * 256) + word
        for q in tl.static_range((PARTS + WARPS_K - 1) // WARPS_K):
            part = q * WARPS_K + warp // 2
            here = cells + ((split * PARTS + part) * 2 + warp % 2) * 128
            tl.store(here, sums[q], mask=(part < PARTS) & (part % ROW_TILES * 8 + 2 * t < rows))
        if not comes_last(ticket_ptr + place, SPLITS):
            return
    for q in tl.static_range((PARTS + WARPS - 1) // WARPS):
        part = q * WARPS + warp
        m, live = part % ROW_TILES * 8 + 2 * t + r % 2, part < PARTS
        if SPLITS > 1:
            there = live & (part % ROW_TILES * 8 + 2 * t < rows)
            gate = sum_of_splits(cells + part * 256, there, PARTS * 256, SPLITS)
            up = sum_of_splits(cells + part * 256 + 128, there, PARTS * 256, SPLITS)
        else:
            gate, up = sums[2 * q], sums[2 * q + 1]
        n = tile * 64 + part // ROW_TILES * 16 + r // 2 * 8 + g
        at = expert * (2 * WIDTH) + n
        gate, up = restored(gate, CODE, SCALES, ROW_TILES), restored(up, CODE, SCALES, ROW_TILES)
        if row_scale_ptr is not None:
            gate *= tl.load(row_scale_ptr + at, mask=live, other=0.0)
            up *= tl.load(row_scale_ptr + at + WIDTH, mask=live, other=0.0)
        if LISTED:
            gate, up = gate + gate_bias, up + up_bias
        elif bias_ptr is not None:
            gate += tl.load(bias_ptr + at, mask=live, other=0.0)
            up += tl.load(bias_ptr + at + WIDTH, mask=live, other=0.0)
        row = block * BLOCK_M + m
        if RAW:
            inner = hidden_ptr + row.to(tl.int64) * (2 * WIDTH) + n
            tl.store(inner, gate.to(hidden_ptr.dtype.element_ty), mask=live)
            tl.store(inner + WIDTH, up.to(hidden_ptr.dtype.element_ty), mask=live)
        else:
            hidden = activated(gate, up, alpha, limit, shift, cubic, False, CLAMPED, CUBED)
            if LISTED:
                tl.store(share_ptr + row, factor, mask=live & (n == 0))
                if down_scale_ptr is not None:
                    factor *= tl.load(down_scale_ptr + expert)
                hidden = tl.where(uses, hidden * factor, 0.0)
            tl.store(hidden_ptr + row.to(tl.int64) * WIDTH + n, hidden.to(hidden_ptr.dtype.element_ty), mask=live)


@triton.jit
def _share(chosen_ptr, weight_ptr, expert, m, rows, SLOTS: tl.constexpr):
    """Return the routing weight of `expert` in rows m, and whether the rows use it."""
    share, uses = tl.zeros([m.shape[0]], tl.float32), m < 0
    for slot in tl.static_range(SLOTS):
        asked = tl.load(chosen_ptr + m * SLOTS + slot, mask=m < rows, other=-1) == expert
        share += tl.load(weight_ptr + m * SLOTS + slot, mask=asked, other=0.0)
        uses |= asked
    return share, uses
