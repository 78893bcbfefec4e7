"""Experts for up to 16 rows in deterministic engines, with the bits of `many_rows_triton`, but without sorting: every
row goes through every used expert, as in `few_rows_triton`.

One row whose weights are in FP8 with scales per group takes two launches (`ordered_row_products_triton`): gate and up
projections; down projections and the sum. Other rows take three: gate and up projections, each row's down projections,
and their sum in the order of the router's preference.
"""

from dataclasses import replace

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.experts.few_row_products_triton import gate_up_of_few_rows
from aerie.kernels.experts.gated import SWIGLU
from aerie.kernels.experts.many_rows_triton import down_projected, many_row_tiles
from aerie.kernels.experts.order_triton import ExpertOrder
from aerie.kernels.experts.ordered.ordered_row_products_triton import down_of_ordered_row, gate_up_of_ordered_row
from aerie.kernels.experts.route import Routed
from aerie.kernels.experts.weights import (
    MAX_FEW_ROWS,
    ORDERED_BLOCK,
    ExpertTiles,
    ExpertWeights,
    InnerRows,
    fits_kernels,
    fits_one_load,
)
from aerie.kernels.fp8.rows import GROUP, Fp8Rows
from aerie.kernels.gemm.workspace import Workspace
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.pdl import pdl_wait

_DOWN_BLOCK = 128  # outputs of a down-projection program of one row


def fits_ordered_rows(weights: ExpertWeights) -> bool:
    """Whether these kernels support the weights: SwiGLU without biases, and sizes that 128 divides."""
    is_plain = weights.activation == SWIGLU and weights.gate_up_bias is None and weights.down_bias is None
    return is_plain and fits_kernels(weights.size, weights.width)


def ordered_row_experts(
    x: Tensor | Fp8Rows, routed: Routed, weights: ExpertWeights, workspace: Workspace, out: Tensor
) -> Tensor:
    """Write the weighted sum of each row's experts to `out`; zeros for padding rows.

    x: as in `aerie.kernels.experts.few_rows_triton.few_row_experts`.
    routed: from `aerie.kernels.experts.route_triton`, with listed experts.
    weights: `fits_ordered_rows` is true for them.
    workspace: at least `aerie.kernels.experts.weights.workspace_size`.
    out: [rows, size], contiguous.

    Reference: `aerie.kernels.experts.grouped.experts_one_by_one`.
    """
    rows, slots = routed.chosen.shape
    if rows == 0:
        return out
    assert rows <= MAX_FEW_ROWS and out.shape == (rows, weights.size) and out.is_contiguous()
    if rows == 1 and isinstance(x, Fp8Rows) and weights.by_group and fits_one_load(weights.width):
        return _one_row(x, routed, weights, workspace, out)
    tiles = replace(many_row_tiles(rows, weights.sizes(slots), deterministic=True), block_m=MAX_FEW_ROWS)
    inner, order = inner_rows(x, routed, weights, tiles)
    return down_projected(inner, routed, order, weights, tiles, out)


def inner_rows(
    x: Tensor | Fp8Rows, routed: Routed, weights: ExpertWeights, tiles: ExpertTiles
) -> tuple[InnerRows, ExpertOrder]:
    """Return the inner activations of all rows in each used expert, and which of them are used."""
    assert routed.used is not None
    rows, slots = routed.chosen.shape
    values, x_scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, None)
    assert values.shape == (rows, weights.size) and values.dtype == weights.gate_up.dtype
    assert x_scales is None or x_scales.is_contiguous()
    size, width, step, block_m, gate_up = weights.size, weights.width, weights.step, tiles.block_m, tiles.gate_up
    most, blocks, device = routed.used.shape[0], width // gate_up.block_n, values.device
    hidden = torch.empty((most * block_m, width), dtype=values.dtype, device=device)
    factors = torch.empty((most, blocks, block_m), dtype=torch.float32, device=device)
    pairs = torch.empty(most * block_m, dtype=torch.int32, device=device)
    gate_up_of_few_rows[(blocks, most)](
        TensorDescriptor.from_tensor(values, [block_m, step]),
        TensorDescriptor.from_tensor(weights.gate_up.flatten(0, 1), [gate_up.block_n, step]),
        x_scales,
        weights.gate_up_scales,
        hidden,
        factors,
        routed.chosen,
        routed.weight,
        routed.used,
        None,
        None,
        pairs,
        rows,
        WIDTH=width,
        SIZE=size,
        SLOTS=slots,
        SLOTS_PADDED=triton.next_power_of_2(slots),
        BLOCK_M=block_m,
        BLOCK_N=gate_up.block_n,
        STEP=step,
        SPLITS=1,
        SPAN=size // step,
        IN_FP8=weights.in_fp8,
        BY_GROUP=weights.by_group,
        INTERPRETED=INTERPRETED,
        num_warps=gate_up.warps,
        num_stages=gate_up.stages,
        **pdl_wait(device),
    )
    order = ExpertOrder(pairs, routed.used, block_m, shared=0, stride=1, count=routed.used)
    return InnerRows(hidden, factors), order


def _one_row(x: Fp8Rows, routed: Routed, weights: ExpertWeights, workspace: Workspace, out: Tensor) -> Tensor:
    slots, size, width, device = routed.chosen.shape[1], weights.size, weights.width, out.device
    assert x.values.shape == (1, size) and x.scales.is_contiguous() and x.values.is_contiguous()
    blocks, groups = width // ORDERED_BLOCK, size // GROUP
    hidden = torch.empty((slots, width), dtype=x.values.dtype, device=device)
    factors = torch.empty((slots, blocks), dtype=torch.float32, device=device)
    together = next(n for n in (4, 2, 1) if groups % n == 0)
    gate_up_of_ordered_row[(2 * blocks, slots)](
        x.values,
        TensorDescriptor.from_tensor(weights.gate_up.flatten(0, 1), [ORDERED_BLOCK, together * GROUP]),
        x.scales,
        weights.gate_up_scales,
        hidden,
        factors,
        routed.chosen,
        workspace.part,
        workspace.tickets,
        WIDTH=width,
        SIZE=size,
        TOGETHER=together,
        INTERPRETED=INTERPRETED,
        num_warps=4,
        num_stages=5,
        **pdl_wait(device),
    )
    down_of_ordered_row[(size // _DOWN_BLOCK, slots)](
        TensorDescriptor.from_tensor(weights.down.flatten(0, 1), [_DOWN_BLOCK, width]),
        hidden,
        factors,
        weights.down_scales,
        out,
        routed.chosen,
        routed.weight,
        workspace.part,
        workspace.tickets,
        WIDTH=width,
        SIZE=size,
        BLOCK_N=_DOWN_BLOCK,
        SLOTS=slots,
        INTERPRETED=INTERPRETED,
        num_warps=8,
        num_stages=1,
        **pdl_wait(device),
    )
    return out
