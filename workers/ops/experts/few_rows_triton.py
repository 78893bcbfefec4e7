"""Experts for the few rows of a round, in two launches: gates and what they gate, then down-projections and the
weighted sum. Reading the weights of the experts that are used is most of the work.

All rows go through every expert that any row goes to: the matrix unit multiplies so many in any case, rows need not be
gathered, and all tiles come through tensor maps. Where a row did not ask for an expert its inner activations are zeros,
so that whatever stands in other rows, padding rows included, does not touch it. A down-projection's program has some
columns of the output and goes through the experts, summing in float32, so that no sum over experts is written and read
again. Nothing is added in an order that changes from run to run; but which programs share a sum depends on the experts
that all rows together use, so that a row's last bits depend on the others (`many_rows` holds that too).

In FP8 inner activations are rounded with a scale for the columns that a program has.
"""

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.ops.interpreter_triton import INTERPRETED
from attention.ops.pdl import pdl_wait
from workers.ops.experts.few_row_products_triton import down_of_few_rows, down_of_one_row, gate_up_of_few_rows
from workers.ops.experts.route import Routed
from workers.ops.experts.weights import ExpertTiles, ExpertWeights, InnerRows
from workers.ops.fp8.rows import Fp8Rows
from workers.ops.gemm.workspace import Workspace


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
    gate_up_of_few_rows[(blocks * gate_up.splits, most)](
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
        **pdl_wait(device),
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
    if down.ahead:
        return _down_of_one_row(inner, routed, weights, workspace, tiles, out)
    step = tiles.inner_step(weights.in_fp8)
    down_of_few_rows[(size // down.block_n, down.splits)](
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
        **pdl_wait(out.device),
    )
    return out


def _down_of_one_row(
    inner: InnerRows,
    routed: Routed,
    weights: ExpertWeights,
    workspace: Workspace,
    tiles: ExpertTiles,
    out: Tensor,
) -> Tensor:
    assert weights.in_fp8 and tiles.gate_up.block_n == 128 and out.shape[0] == 1
    assert routed.used is not None and routed.used.shape[0] == tiles.down.splits
    down, size, width = tiles.down, weights.size, weights.width
    down_of_one_row[(size // down.block_n, down.splits)](
        TensorDescriptor.from_tensor(weights.down.flatten(0, 1), [down.block_n, width]),
        inner.values,
        inner.factors,
        weights.down_scales,
        out,
        routed.used,
        routed.num_used,
        workspace.part,
        workspace.tickets,
        WIDTH=width,
        SIZE=size,
        BLOCK_M=tiles.block_m,
        BLOCK_N=down.block_n,
        SPLITS=down.splits,
        BY_GROUP=weights.by_group,
        INTERPRETED=INTERPRETED,
        num_warps=down.warps,
        num_stages=down.stages,
        **pdl_wait(out.device),
    )
    return out
