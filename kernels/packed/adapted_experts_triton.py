# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton implementation of `aerie.kernels.packed.adapted_experts`, for any number of rows: sorted by expert, as in
`aerie.kernels.experts.adapted.sorted_rows_triton`."""

import torch
from torch import Tensor

from aerie.kernels.experts.adapted.product import ExpertAdapters, ExpertBlocks, add_expert_lora
from aerie.kernels.experts.adapted.sorted_rows_triton import activated_cells
from aerie.kernels.experts.many_rows_triton import sum_choices
from aerie.kernels.experts.order_triton import order_by_expert
from aerie.kernels.experts.route import RouterLogits
from aerie.kernels.experts.route_triton import route
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.packed.expert_tiles import packed_expert_tiles
from aerie.kernels.packed.experts import PackedExpertWeights
from aerie.kernels.packed.experts_triton import down_of_order, gate_up
from aerie.kernels.packed.weight import TILE

_MANY_ROWS = 1 << 20  # whose tiles have 16 rows, which the adapters' products need


def packed_adapted_experts(
    x: Tensor,
    router: RouterLogits,
    weights: PackedExpertWeights,
    adapters: ExpertAdapters,
    options: GEMMOptions,
    out: Tensor | None = None,
) -> Tensor:
    """Implement `aerie.kernels.packed.adapted_experts.packed_adapted_experts`."""
    assert options.workspace is not None, "serves"
    rows = x.shape[0]
    out = torch.empty((rows, weights.size), dtype=x.dtype, device=x.device) if out is None else out
    if rows == 0:
        return out
    routed = route(router, 0, options.workspace.tickets, False, weights.held)
    slots = routed.chosen.shape[1]
    tiles = packed_expert_tiles(_MANY_ROWS, weights.sizes(slots))
    try:
        order = order_by_expert(routed, weights.num_experts, tiles.block_m)
        blocks = ExpertBlocks(order.pairs, order.experts, tiles.block_m, slots)
        inner = torch.empty((order.pairs.shape[0], 2 * weights.width), dtype=x.dtype, device=x.device)
        gate_up(x, routed, order.experts, order.pairs, weights, None, tiles.gate_up, inner, None, raw=True)
    except BaseException:  # usually out of memory, after which the engine continues
        routed.reset_count()
        raise
    add_expert_lora(inner, x, adapters.gate_up, blocks, adapters.lora_indices)
    hidden = activated_cells(inner, order, weights.activation, TILE)
    parts = torch.empty((rows * slots, weights.size), dtype=out.dtype, device=out.device)
    down_of_order(hidden, routed, order, weights, tiles.down, 0, parts)
    add_expert_lora(parts, hidden, adapters.down, blocks, adapters.lora_indices, routed.weight)
    sum_choices(parts, routed.chosen, out, 0, weights.size, weights.held is not None)
    return out
