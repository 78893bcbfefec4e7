# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Experts for many rows: those of batches that verify, and of prompts. Rows are ordered by expert into blocks
(`expert_order`); a program multiplies a block by some of its expert's columns. Four launches: the order; gates and what
they gate of gathered rows; down-projections, each weighted and written to its row's place; their sums.

A row's result is a function of that row: its sums have one order whatever the tiles, and are not split.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.online_softmax import INTERPRETED
from attention.kernels.pdl import pdl_wait, supports_pdl
from workers.layers.kernels.expert_order import ExpertOrder, order_by_expert
from workers.layers.kernels.expert_weights import (
    ExpertSizes,
    ExpertTiles,
    ExpertWeights,
    ProductTiles,
    block_of,
)
from workers.layers.kernels.fp8_rows import Fp8Rows, to_fp8

MAX_ROWS = 4096  # at once: a result of each row's each expert is written
_SUM_COLUMNS = 1024


@triton.jit
def _gate_up_of_blocks(
    x_ptr,
    w_desc,
    x_scales_ptr,
    w_scales_ptr,
    hidden_ptr,
    hidden_scales_ptr,
    pair_ptr,
    expert_ptr,
    row_step,
    group_step,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    IN_FP8: tl.constexpr,
    BY_GROUP: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    groups: tl.constexpr = SIZE // 128
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, tile = tl.program_id(0), tl.program_id(1)
    expert = tl.load(expert_ptr + tile)
    if expert < 0:
        return
    n, m = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    pair = tl.load(pair_ptr + tile * BLOCK_M + m)
    inside, row = pair >= 0, tl.maximum(pair, 0) // SLOTS
    x = x_ptr + row.to(tl.int64)[:, None] * SIZE + tl.arange(0, STEP)[None, :]
    gate_row = expert * (2 * WIDTH) + block * BLOCK_N
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if BY_GROUP:
        x_scales = x_scales_ptr + row * row_step
        gate_scales = w_scales_ptr + (gate_row // 64 + tl.arange(0, BLOCK_N) // 64) * groups
        up_scales = gate_scales + WIDTH // 64 * groups
        x_scale = tl.load(x_scales, mask=inside, other=0.0)
        gate_scale, up_scale = tl.load(gate_scales), tl.load(up_scales)
    for step in range(SIZE // STEP):
        inputs = tl.load(x + step * STEP, mask=inside[:, None], other=0.0)
        gate_weights = w_desc.load([gate_row, step * STEP])
        up_weights = w_desc.load([gate_row + WIDTH, step * STEP])
        if IN_FP8:
            gate_part = tl.dot(gate_weights, tl.trans(inputs))
            up_part = tl.dot(up_weights, tl.trans(inputs))
            if BY_GROUP:
                more = (step + 1) * STEP < SIZE
                next_x_scale = tl.load(x_scales + (step + 1) * group_step, mask=inside & more, other=0.0)
                next_gate_scale = tl.load(gate_scales + step + 1, mask=more, other=0.0)
                next_up_scale = tl.load(up_scales + step + 1, mask=more, other=0.0)
                gate += gate_part * (gate_scale[:, None] * x_scale[None, :])
                up += up_part * (up_scale[:, None] * x_scale[None, :])
                x_scale, gate_scale, up_scale = next_x_scale, next_gate_scale, next_up_scale
            else:
                gate += gate_part
                up += up_part
        else:
            if INTERPRETED:
                inputs, gate_weights = inputs.to(tl.float32), gate_weights.to(tl.float32)
                up_weights = up_weights.to(tl.float32)
            gate = tl.dot(gate_weights, tl.trans(inputs), gate)
            up = tl.dot(up_weights, tl.trans(inputs), up)
    if IN_FP8 and not BY_GROUP:
        x_scale = tl.load(x_scales_ptr + row * row_step, mask=inside, other=0.0)
        scales = w_scales_ptr + expert * (2 * WIDTH) + n
        gate *= tl.load(scales)[:, None] * x_scale[None, :]
        up *= tl.load(scales + WIDTH)[:, None] * x_scale[None, :]
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    at = (tile * BLOCK_M + m).to(tl.int64)
    if IN_FP8:
        scale = tl.maximum(tl.max(tl.abs(hidden), 0), 1e-12) / 448.0
        tl.store(hidden_scales_ptr + (tile * (WIDTH // BLOCK_N) + block) * BLOCK_M + m, scale)
        tl.store(hidden_ptr + at[None, :] * WIDTH + n[:, None], to_fp8(hidden / scale[None, :], INTERPRETED))
    else:
        tl.store(hidden_ptr + at[None, :] * WIDTH + n[:, None], hidden.to(hidden_ptr.dtype.element_ty))


@triton.jit
def _down_of_blocks(
    hidden_desc,
    w_desc,
    hidden_scales_ptr,
    w_scales_ptr,
    part_ptr,
    weight_ptr,
    pair_ptr,
    expert_ptr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    IN_FP8: tl.constexpr,
    BY_GROUP: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    steps: tl.constexpr = WIDTH // STEP
    groups: tl.constexpr = WIDTH // 128
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, tile = tl.program_id(0), tl.program_id(1)
    expert = tl.load(expert_ptr + tile)
    if expert < 0:
        return
    n, m = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    pair = tl.load(pair_ptr + tile * BLOCK_M + m)
    inside = pair >= 0
    share = tl.load(weight_ptr + pair, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(steps):
        weights = w_desc.load([expert * SIZE + block * BLOCK_N, step * STEP])
        inputs = hidden_desc.load([tile * BLOCK_M, step * STEP])
        if IN_FP8:
            factor = tl.load(hidden_scales_ptr + (tile * steps + step) * BLOCK_M + m)
            part = tl.dot(weights, tl.trans(inputs))
            if BY_GROUP:
                rows_of_scales = expert * (SIZE // 64) + n // 64
                scale = tl.load(w_scales_ptr + rows_of_scales * groups + step * STEP // 128)
                acc += part * (scale[:, None] * factor[None, :])
            else:
                acc += part * factor[None, :]
        else:
            if INTERPRETED:
                weights, inputs = weights.to(tl.float32), inputs.to(tl.float32)
            acc = tl.dot(weights, tl.trans(inputs), acc)
    if IN_FP8 and not BY_GROUP:
        acc *= tl.load(w_scales_ptr + expert * SIZE + n)[:, None]
    acc *= share[None, :]
    out = part_ptr + pair.to(tl.int64)[None, :] * SIZE + n[:, None]
    tl.store(out, acc.to(part_ptr.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _sum_slots(
    part_ptr,
    chosen_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # a row goes to all its experts, or, padding, to none
    inside = (column < SIZE) & (tl.load(chosen_ptr + row * SLOTS) >= 0)
    acc = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(SLOTS):
        acc += tl.load(part_ptr + (row * SLOTS + slot) * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, acc.to(out_ptr.dtype.element_ty), mask=column < SIZE)


def many_row_tiles(rows: int, sizes: ExpertSizes, deterministic: bool = False) -> ExpertTiles:
    """Blocks of as many rows as an expert has when rows choose evenly. deterministic: with scales of inner activations
    that are the same for any number of rows. Set by `tests.bench.experts --sweep` on an H200."""
    each = rows * sizes.experts_per_token / sizes.num_routed
    block_m = min(64, block_of(int(each * 1.25)))
    down = ProductTiles(128, 1, stages=3, warps=8)
    if block_m == 64 or deterministic:
        return ExpertTiles(block_m, ProductTiles(128, 1, stages=3, warps=8), down)
    return ExpertTiles(block_m, ProductTiles(64, 1, stages=5 if block_m == 16 else 3, warps=4), down)


def many_row_experts(
    x: Tensor | Fp8Rows, chosen: Tensor, weight: Tensor, weights: ExpertWeights, tiles: ExpertTiles, out: Tensor
) -> Tensor:
    """out [rows, size] = the weighted sum of each row's experts, zeros for padding rows; contiguous.

    x: as `workers.layers.kernels.few_row_experts.few_row_experts` takes it, scales in any order. chosen,
    weight: of `workers.layers.kernels.route`. tiles: any of `many_row_tiles`. Memory beside x: rows * slots results in
    out's type, and as many inner activations, and those of the free places in experts' last blocks.

    Reference: `workers.layers.experts.experts_one_by_one`.
    """
    rows, slots = chosen.shape
    values, x_scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, None)
    assert values.shape == (rows, weights.size) == out.shape and values.dtype == weights.gate_up.dtype
    assert values.is_contiguous() and out.is_contiguous()
    assert tiles.gate_up.splits == tiles.down.splits == 1
    if rows == 0:
        return out
    order = order_by_expert(chosen, weights.num_experts, tiles.block_m)
    parts = torch.empty((rows * slots, weights.size), dtype=out.dtype, device=out.device)
    _products(values, x_scales, weight, order, weights, tiles, parts)
    _sum_slots[(rows, triton.cdiv(weights.size, _SUM_COLUMNS))](
        parts,
        chosen,
        out,
        SIZE=weights.size,
        SLOTS=slots,
        BLOCK=_SUM_COLUMNS,
        num_warps=4,
        **pdl_wait(supports_pdl(out.device)),
    )
    return out


def _products(
    values: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    order: ExpertOrder,
    weights: ExpertWeights,
    tiles: ExpertTiles,
    parts: Tensor,
) -> None:
    """parts [rows * slots, size]: each row's each expert's, weighted."""
    size, width, block_m, gate_up, down = weights.size, weights.width, tiles.block_m, tiles.gate_up, tiles.down
    num_blocks, blocks = order.experts.shape[0], width // gate_up.block_n
    inner = gate_up.block_n if weights.in_fp8 else 64  # columns of a step of the second product
    hidden = torch.empty((num_blocks * block_m, width), dtype=values.dtype, device=values.device)
    scales = torch.empty((num_blocks, blocks, block_m), dtype=torch.float32, device=values.device)
    early = pdl_wait(supports_pdl(values.device))
    _gate_up_of_blocks[(blocks, num_blocks)](
        values,
        TensorDescriptor.from_tensor(weights.gate_up.flatten(0, 1), [gate_up.block_n, weights.step]),
        x_scales,
        weights.gate_up_scales,
        hidden,
        scales,
        order.pairs,
        order.experts,
        0 if x_scales is None else x_scales.stride(0),
        0 if x_scales is None else x_scales.stride(1),
        WIDTH=width,
        SIZE=size,
        SLOTS=weight.shape[1],
        BLOCK_M=block_m,
        BLOCK_N=gate_up.block_n,
        STEP=weights.step,
        IN_FP8=weights.in_fp8,
        BY_GROUP=weights.by_group,
        INTERPRETED=INTERPRETED,
        num_warps=gate_up.warps,
        num_stages=gate_up.stages,
        **early,
    )
    _down_of_blocks[(size // down.block_n, num_blocks)](
        TensorDescriptor.from_tensor(hidden, [block_m, inner]),
        TensorDescriptor.from_tensor(weights.down.flatten(0, 1), [down.block_n, inner]),
        scales,
        weights.down_scales,
        parts,
        weight,
        order.pairs,
        order.experts,
        WIDTH=width,
        SIZE=size,
        BLOCK_M=block_m,
        BLOCK_N=down.block_n,
        STEP=inner,
        IN_FP8=weights.in_fp8,
        BY_GROUP=weights.by_group,
        INTERPRETED=INTERPRETED,
        num_warps=down.warps,
        num_stages=down.stages,
        **early,
    )
