# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Experts with LoRA adapters in Triton, for any number of rows, sorted by expert as in
`aerie.kernels.experts.many_rows_triton`.

Nine launches: the order; gate and up projections; their adapters' part (two); the activation; weighted down
projections, one result per row and expert; their adapters' part (two); the sum. Tiles have three classes by the number
of rows, so that `VARIANT_ROWS` launches all variants.
"""

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aerie.kernels.experts.adapted.cells_triton import activate_cells, gate_up_of_cells
from aerie.kernels.experts.adapted.product import ExpertAdapters, ExpertBlocks, add_expert_lora
from aerie.kernels.experts.gated import SWIGLU, GatedActivation
from aerie.kernels.experts.many_rows_triton import down_projections, many_row_tiles, sum_choices
from aerie.kernels.experts.order_triton import ExpertOrder, bins_of, order_by_expert
from aerie.kernels.experts.route import Routed
from aerie.kernels.experts.weights import ExpertSizes, ExpertTiles, ExpertWeights, InnerRows
from aerie.kernels.fp8.rows import Fp8Rows
from aerie.kernels.fp8.rows_triton import quantize_rows
from aerie.kernels.gemm.blocks import cdiv
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.lora.product import ROW_LIMITS
from aerie.kernels.pdl import pdl_wait

_TYPICAL_ROWS = (16, 256, 2048)  # by the class of rows


def adapted_row_tiles(rows: int, sizes: ExpertSizes) -> ExpertTiles:
    """Return the tiles, the same for all numbers of rows between two of ROW_LIMITS."""
    return many_row_tiles(_TYPICAL_ROWS[sum(rows > limit for limit in ROW_LIMITS)], sizes)


def adapted_row_experts(
    x: Tensor, routed: Routed, weights: ExpertWeights, adapters: ExpertAdapters, tiles: ExpertTiles, out: Tensor
) -> Tensor:
    """Write the weighted sum of each row's experts with its adapter to `out`; zeros for rows without experts.

    x: [rows, size] in out's dtype, contiguous.
    routed: from `aerie.kernels.experts.route_triton`, with counted rows.
    weights: without shared experts.
    tiles: from `adapted_row_tiles`.
    out: [rows, size], contiguous.

    Reference: `aerie.kernels.experts.adapted.grouped.adapted_experts`.
    """
    rows, slots = routed.chosen.shape
    if rows == 0:
        return out
    assert weights.num_shared == 0 and out.shape == (rows, weights.size) and out.is_contiguous()
    try:
        order = order_by_expert(routed, weights.num_experts, tiles.block_m)
        blocks = ExpertBlocks(order.pairs, order.experts, tiles.block_m, slots)
        inner = torch.empty((order.pairs.shape[0], 2 * weights.width), dtype=x.dtype, device=x.device)
        _gate_up(quantize_rows(x, weights.by_group) if weights.in_fp8 else x, order, weights, tiles, slots, inner)
    except BaseException:  # usually out of memory, after which the engine continues
        routed.reset_count()
        raise
    add_expert_lora(inner, x, adapters.gate_up, blocks, adapters.lora_indices)
    hidden, factored = _inner_rows(inner, order, weights, tiles)
    parts = torch.empty((rows * slots, weights.size), dtype=out.dtype, device=out.device)
    down_projections(factored, routed.weight, order, weights, tiles, 0, parts)
    add_expert_lora(parts, hidden, adapters.down, blocks, adapters.lora_indices, routed.weight)
    sum_choices(parts, routed.chosen, out, 0, weights.size, weights.held is not None)
    return out


def _gate_up(
    x: Tensor | Fp8Rows, order: ExpertOrder, weights: ExpertWeights, tiles: ExpertTiles, slots: int, inner: Tensor
) -> None:
    """Write gate and up of each cell to inner [cells, 2 * width]."""
    values, scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, None)
    width, gate_up = weights.width, tiles.gate_up
    assert values.dtype == weights.gate_up.dtype and values.shape[1] == weights.size and values.is_contiguous()
    gate_up_of_cells[(cdiv(width, gate_up.block_n), order.experts.shape[0])](
        values,
        TensorDescriptor.from_tensor(weights.gate_up.flatten(0, 1), [gate_up.block_n, weights.step]),
        scales,
        weights.gate_up_scales,
        weights.gate_up_bias,
        inner,
        order.pairs,
        order.experts,
        order.count,
        0 if scales is None else scales.stride(0),
        0 if scales is None else scales.stride(1),
        EXPERTS=weights.num_experts,
        BINS=bins_of(weights.num_experts),
        WIDTH=width,
        SIZE=weights.size,
        SLOTS=slots,
        BLOCK_M=tiles.block_m,
        BLOCK_N=gate_up.block_n,
        STEP=weights.step,
        IN_FP8=weights.in_fp8,
        BY_GROUP=weights.by_group,
        WEIGHTS_FIRST=tiles.weights_first,
        INTERPRETED=INTERPRETED,
        num_warps=gate_up.warps,
        num_stages=gate_up.stages,
        **pdl_wait(values.device),
    )


def _inner_rows(
    inner: Tensor, order: ExpertOrder, weights: ExpertWeights, tiles: ExpertTiles
) -> tuple[Tensor, InnerRows]:
    """Return the inner activations by cell: [cells, width] in inner's dtype, and as the down projections take them."""
    num_blocks, blocks = order.experts.shape[0], cdiv(weights.width, tiles.gate_up.block_n)
    factors = torch.empty((num_blocks, blocks, tiles.block_m), dtype=torch.float32, device=inner.device)
    cells, fp8 = inner.shape[0], weights.down.dtype
    values = torch.empty((cells, weights.width), dtype=fp8, device=inner.device) if weights.in_fp8 else None
    hidden = activated_cells(inner, order, weights.activation, tiles.gate_up.block_n, values, factors)
    return hidden, InnerRows(hidden if values is None else values, factors)


def activated_cells(
    inner: Tensor,
    order: ExpertOrder,
    activation: GatedActivation,
    block_n: int,
    values: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """Return the activation of inner [cells, 2 * width]: [cells, width] in its dtype.

    values, factors: of `InnerRows`, written; None: not in FP8.
    """
    cells, width = inner.shape[0], inner.shape[1] // 2
    hidden = torch.empty((cells, width), dtype=inner.dtype, device=inner.device)
    activate_cells[(cdiv(width, block_n), order.experts.shape[0])](
        inner,
        hidden,
        values,
        factors,
        order.pairs,
        order.experts,
        activation.alpha,
        activation.limit or 0.0,
        activation.shift,
        activation.cubic,
        WIDTH=width,
        BLOCK_M=order.block_m,
        BLOCK_N=block_n,
        PLAIN=activation == SWIGLU,
        CLAMPED=activation.limit is not None,
        CUBED=activation.cubic != 0.0,
        INTERPRETED=INTERPRETED,
        num_warps=4,
        **pdl_wait(inner.device),
    )
    return hidden
