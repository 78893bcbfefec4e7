# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, index"
"""Experts for the few rows of a round, in two launches: gates and what they gate, then down-projections and the
weighted sum. Reading the weights of the experts that are used is most of the work.

All rows go through every expert that any row goes to: the matrix unit multiplies so many in any case, rows need not be
gathered, and all tiles come through tensor maps. Where a row did not ask for an expert its inner activations are zeros,
so that whatever stands in other rows, padding rows included, does not touch it. A down-projection's program has some
columns of the output and goes through the experts, summing in float32, so that no sum over experts is written and read
again. Nothing is added in an order that changes from run to run; but which programs share a sum depends on the experts
that all rows together use, so that a row's last bits depend on the others (`many_row_experts` holds that too).

In FP8 inner activations are rounded with a scale for the columns that a program has.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.online_softmax import INTERPRETED
from attention.kernels.pdl import pdl_wait, supports_pdl
from workers.layers.kernels.expert_weights import ExpertTiles, ExpertWeights, InnerRows
from workers.layers.kernels.fp8_rows import Fp8Rows, scale_of, to_fp8
from workers.layers.kernels.gate_products import add_gates, scales_of_gates, times_channels
from workers.layers.kernels.route import Routed
from workers.layers.kernels.skinny_gemm import Workspace


@triton.jit
def _sum_of_splits(cells, there, STEP: tl.constexpr, SPLITS: tl.constexpr):
    """L1 is not coherent: what other programs wrote is read from L2."""
    acc = tl.load(cells, mask=there, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        acc += tl.load(cells + split * STEP, mask=there, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit(do_not_specialize=["rows"])
def _gate_up(
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
    groups: tl.constexpr = SIZE // 128
    blocks: tl.constexpr = WIDTH // BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
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
    if SPLITS > 1:
        place = tile * blocks + block
        # outputs of a row lie side by side, and of rows that are not there nothing is written or read
        there = (m < rows)[None, :]
        cells = part_ptr + place * (SPLITS * 2 * BLOCK_N * BLOCK_M)
        cells += tl.arange(0, BLOCK_N)[:, None] + m[None, :] * BLOCK_N
        tl.store(cells + 2 * split * (BLOCK_N * BLOCK_M), gate, mask=there)
        tl.store(cells + (2 * split + 1) * (BLOCK_N * BLOCK_M), up, mask=there)
        # The barrier puts every thread's stores before the one thread's release.
        tl.debug_barrier()
        if tl.atomic_add(ticket_ptr + place, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(ticket_ptr + place, 0)
        gate = _sum_of_splits(cells, there, 2 * BLOCK_N * BLOCK_M, SPLITS)
        up = _sum_of_splits(cells + BLOCK_N * BLOCK_M, there, 2 * BLOCK_N * BLOCK_M, SPLITS)
    if IN_FP8 and not BY_GROUP:
        x_scale = tl.load(x_scales_ptr + m, mask=m < rows, other=0.0)
        gate, up = times_channels(gate, up, x_scale, w_scales_ptr + expert * (2 * WIDTH) + n, WIDTH)
    slot = tl.arange(0, SLOTS_PADDED)
    pair = m[:, None] * SLOTS + slot[None, :]
    asked = tl.load(chosen_ptr + pair, mask=(m < rows)[:, None] & (slot < SLOTS)[None, :], other=-1) == expert
    share = tl.sum(tl.load(weight_ptr + pair, mask=asked, other=0.0), 1)
    anybody = tl.max(asked.to(tl.int32), 1) > 0
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
    """Of rows [BLOCK_M] and of outputs `n`, for one step of an expert."""
    factor = tl.load(factor_ptr + (tile * STEPS + step) * BLOCK_M + m)
    place = (expert * (SIZE // 64) + n // 64) * GROUPS + step * STEP // 128 if BY_GROUP else expert * SIZE + n
    return factor, tl.load(w_scales_ptr + place)


@triton.jit(do_not_specialize=["rows", "most"])
def _down(
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
    most,
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
    steps: tl.constexpr = WIDTH // STEP
    groups: tl.constexpr = WIDTH // 128
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, split = tl.program_id(0), tl.program_id(1)
    n, m = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    mine = (tl.load(num_used_ptr) - split + SPLITS - 1) // SPLITS
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Read one step before their use: experts, so that tiles of weights are on their way, and scales.
    last = mine * steps - 1
    expert = tl.maximum(tl.load(used_ptr + split, mask=split < most, other=0), 0)  # beside num_used, not after it
    factor, scale = 0.0, 0.0
    if IN_FP8:
        first = tl.where(split < most, split, 0)
        factor, scale = _factor_and_scale(
            factor_ptr, w_scales_ptr, expert, first, 0, n, m, steps, groups, SIZE, BLOCK_M, STEP, BY_GROUP
        )
    for i in range(mine * steps):
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
    if SPLITS > 1:
        there = (m < rows)[None, :]
        cells = part_ptr + block * (SPLITS * BLOCK_N * BLOCK_M) + tl.arange(0, BLOCK_N)[:, None] + m[None, :] * BLOCK_N
        tl.store(cells + split * (BLOCK_N * BLOCK_M), acc, mask=there)
        tl.debug_barrier()
        if tl.atomic_add(ticket_ptr + block, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(ticket_ptr + block, 0)
        acc = _sum_of_splits(cells, there, BLOCK_N * BLOCK_M, SPLITS)
    out = out_ptr + m.to(tl.int64)[None, :] * SIZE + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[None, :])


def few_row_experts(
    x: Tensor | Fp8Rows,
    routed: Routed,
    weights: ExpertWeights,
    workspace: Workspace,
    tiles: ExpertTiles,
    out: Tensor,
) -> Tensor:
    """out [rows, size] = the weighted sum of each row's experts, zeros for padding rows; of a 16- or 32-bit type,
    contiguous.

    x: [rows, size] of the weights' type, or of `quantize_rows` if they are FP8, with scales of groups if they have
    such. routed: of `route`, for at most MAX_FEW_ROWS rows. tiles: of `few_row_tiles` for at least as many rows.
    workspace: as large as `workspace_size` says.

    Reference: `workers.layers.experts.experts_one_by_one`.
    """
    if routed.chosen.shape[0] == 0:
        return out
    return down_projected(inner_rows(x, routed, weights, workspace, tiles), routed, weights, workspace, tiles, out)


def inner_rows(
    x: Tensor | Fp8Rows, routed: Routed, weights: ExpertWeights, workspace: Workspace, tiles: ExpertTiles
) -> InnerRows:
    """Of all rows and each expert that is used, zeros where a row did not ask for it."""
    assert routed.used is not None and routed.num_used is not None
    rows, slots = routed.chosen.shape
    values, x_scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, None)
    assert rows <= tiles.block_m and values.shape == (rows, weights.size) and values.dtype == weights.gate_up.dtype
    assert x_scales is None or x_scales.is_contiguous()
    size, width, step, block_m, gate_up = weights.size, weights.width, weights.step, tiles.block_m, tiles.gate_up
    most, blocks, device = routed.used.shape[0], width // gate_up.block_n, values.device
    hidden = torch.empty((most * block_m, width), dtype=values.dtype, device=device)
    factors = torch.empty((most, blocks, block_m), dtype=torch.float32, device=device) if weights.in_fp8 else None
    _gate_up[(blocks * gate_up.splits, most)](
        TensorDescriptor.from_tensor(values, [block_m, step]),
        TensorDescriptor.from_tensor(weights.gate_up.flatten(0, 1), [gate_up.block_n, step]),
        x_scales,
        weights.gate_up_scales,
        hidden,
        factors,
        routed.chosen,
        routed.weight,
        routed.used,
        workspace.part,
        workspace.tickets,
        rows,
        WIDTH=width,
        SIZE=size,
        SLOTS=slots,
        SLOTS_PADDED=triton.next_power_of_2(slots),
        BLOCK_M=block_m,
        BLOCK_N=gate_up.block_n,
        STEP=step,
        SPLITS=gate_up.splits,
        SPAN=size // step // gate_up.splits,
        IN_FP8=weights.in_fp8,
        BY_GROUP=weights.by_group,
        INTERPRETED=INTERPRETED,
        num_warps=gate_up.warps,
        num_stages=gate_up.stages,
        **pdl_wait(supports_pdl(device)),
    )
    return InnerRows(hidden, factors)


def down_projected(
    inner: InnerRows,
    routed: Routed,
    weights: ExpertWeights,
    workspace: Workspace,
    tiles: ExpertTiles,
    out: Tensor,
) -> Tensor:
    """out [rows, size]: their down-projections, weighted and summed."""
    assert routed.used is not None and routed.num_used is not None and out.is_contiguous()
    rows, size, width, block_m, down = routed.chosen.shape[0], weights.size, weights.width, tiles.block_m, tiles.down
    assert out.shape == (rows, size)
    step = tiles.inner_step(weights.in_fp8)
    _down[(size // down.block_n, down.splits)](
        TensorDescriptor.from_tensor(inner.values, [block_m, step]),
        TensorDescriptor.from_tensor(weights.down.flatten(0, 1), [down.block_n, step]),
        inner.factors,
        weights.down_scales,
        out,
        routed.used,
        routed.num_used,
        workspace.part,
        workspace.tickets,
        rows,
        routed.used.shape[0],
        WIDTH=width,
        SIZE=size,
        BLOCK_M=block_m,
        BLOCK_N=down.block_n,
        STEP=step,
        SPLITS=down.splits,
        IN_FP8=weights.in_fp8,
        BY_GROUP=weights.by_group,
        INTERPRETED=INTERPRETED,
        num_warps=down.warps,
        num_stages=down.stages,
        **pdl_wait(supports_pdl(out.device)),
    )
    return out
