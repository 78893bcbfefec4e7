"""Experts for up to 16 rows in deterministic engines, with the bits of `many_rows_triton`, but without sorting: every
row goes through every used expert, as in `few_rows_triton`.

One row whose weights are in FP8 with scales per group takes two launches (`ordered_row_products_triton`): gate and up
projections; down projections and the sum. Other rows take three: gate and up projections, each row's down projections,
and their sum in the order of the router's preference.
"""

from dataclasses import replace

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.experts.few_rows_triton import inner_rows
from aerie.kernels.experts.gated import SWIGLU
from aerie.kernels.experts.many_rows_triton import down_projected, many_row_tiles
from aerie.kernels.experts.order_triton import ExpertOrder
from aerie.kernels.experts.ordered.ordered_row_products_triton import down_of_ordered_row, gate_up_of_ordered_row
from aerie.kernels.experts.route import Routed
from aerie.kernels.experts.weights import (
    MAX_FEW_ROWS,
    ORDERED_BLOCK,
    ExpertWeights,
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
    assert routed.used is not None
    pairs = torch.empty(routed.used.shape[0] * MAX_FEW_ROWS, dtype=torch.int32, device=out.device)
    inner = inner_rows(x, routed, weights, None, tiles, pairs)
    order = ExpertOrder(pairs, routed.used, MAX_FEW_ROWS, shared=0, stride=1, count=routed.used)
    return down_projected(inner, routed, order, weights, tiles, out)


def _one_row(x: Fp8Rows, routed: Routed, weights: ExpertWeights, workspace: Workspace, out: Tensor) -> Tensor:
    """Compute the experts of one row in two launches, with a program for each of its experts and block of outputs."""
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
