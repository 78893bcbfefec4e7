"""The Triton implementation of `aerie.kernels.packed.experts`.

Up to MAX_LISTED_ROWS rows (`listed_experts`, which can compute up to a block of them), two launches: gate and up
projections of all rows with each used expert; down projections and their weighted sum. More rows, or deterministic
engines, four launches: the sort by expert; gate and up projections of each block of rows; down projections, one result
per row and expert; their sum. With very many rows the last two run over spans of outputs, which bounds memory.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from aerie.kernels.experts.many_rows_triton import MAX_PARTIAL_BYTES, sum_choices
from aerie.kernels.experts.order_triton import ExpertOrder, bins_of, order_by_expert
from aerie.kernels.experts.route import Routed, RouterLogits
from aerie.kernels.experts.route_triton import route
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.interpreter_triton import INTERPRETED
from aerie.kernels.packed.expert_down_triton import down_of_blocks, down_of_listed
from aerie.kernels.packed.expert_gate_up_triton import gate_up_of_blocks
from aerie.kernels.packed.expert_tiles import PackedExpertTiles, PackedTiles, lists_experts, packed_expert_tiles
from aerie.kernels.packed.experts import PackedExpertWeights
from aerie.kernels.packed.stream_triton import TL_TYPES
from aerie.kernels.packed.weight import TILE, PackedWeight
from aerie.kernels.pdl import pdl_wait


def packed_expert_products(
    x: Tensor, router: RouterLogits, weights: PackedExpertWeights, options: GEMMOptions, out: Tensor | None = None
) -> Tensor:
    """See `aerie.kernels.packed.experts.packed_expert_products`."""
    assert options.workspace is not None, "serves"
    rows = x.shape[0]
    out = torch.empty((rows, weights.size), dtype=x.dtype, device=x.device) if out is None else out
    if rows == 0:
        return out
    listed = lists_experts(rows, options.deterministic)
    routed = route(router, 0, options.workspace.tickets, listed, weights.held)
    tiles = packed_expert_tiles(rows, weights.sizes(routed.chosen.shape[1]), options.deterministic)
    if routed.used is not None:
        return listed_experts(x, routed, weights, options.workspace, tiles, out)
    return ordered_experts(x, routed, weights, tiles, out)


def listed_experts(
    x: Tensor,
    routed: Routed,
    weights: PackedExpertWeights,
    workspace: Workspace,
    tiles: PackedExpertTiles,
    out: Tensor,
) -> Tensor:
    """Write the weighted sum of each row's experts to `out`; zeros for padding rows.

    x: [rows, size] bfloat16, last stride 1; at most `tiles.block_m` rows.
    routed: from `aerie.kernels.experts.route_triton`; `routed.used` lists the experts that any row uses. Each has a
        block of all rows.
    workspace: at least `aerie.kernels.packed.expert_tiles.partial_sizes`.
    """
    assert routed.used is not None and x.shape[0] <= tiles.block_m
    block_rows = routed.used.shape[0] * tiles.block_m
    hidden = torch.empty((block_rows, weights.width), dtype=x.dtype, device=x.device)
    weight_of_row = torch.empty(block_rows, dtype=torch.float32, device=x.device)
    gate_up(x, routed, routed.used, None, weights, workspace, tiles.gate_up, hidden, weight_of_row)
    return down_of_used(hidden, weight_of_row, routed, weights, workspace, tiles.down, out)


def down_of_used(
    hidden: Tensor,
    share: Tensor,
    routed: Routed,
    weights: PackedExpertWeights,
    workspace: Workspace,
    down: PackedTiles,
    out: Tensor,
) -> Tensor:
    """Write the weighted sum of down projections to `out`.

    hidden: [used experts * 8, width] inner activations times routing weights, from `gate_up`: 8 rows for each expert.
    share: [used experts * 8] float32 routing weights of these rows; they weight the bias.
    down: tiles of this product.
    out: [rows, size], written; at most 8 rows.
    """
    assert routed.used is not None and routed.num_used is not None and out.is_contiguous() and down.row_tiles == 1
    down_of_listed[(triton.cdiv(weights.size, TILE * down.warps_n), down.splits)](
        hidden,
        weights.down.codes,
        weights.down.scales,
        weights.down.zeros,
        weights.down_bias,
        share,
        out,
        routed.used,
        routed.num_used,
        workspace.part,
        workspace.tickets,
        out.shape[0],
        routed.used.shape[0],
        WARPS_N=down.warps_n,
        SPLITS=down.splits,
        **_common(hidden, weights, weights.down, down, weights.width, 1),
    )
    return out


def ordered_experts(
    x: Tensor, routed: Routed, weights: PackedExpertWeights, tiles: PackedExpertTiles, out: Tensor
) -> Tensor:
    """Write the weighted sum of each row's experts to `out`; zeros for rows without experts, such as padding.

    x: [rows, size] bfloat16, last stride 1.
    routed: from `aerie.kernels.experts.route_triton`, with counted rows.

    Scratch: as in `aerie.kernels.experts.many_rows_triton.many_row_experts`.
    """
    rows, slots = routed.chosen.shape
    assert out.is_contiguous() and tiles.gate_up.splits == tiles.down.splits == 1
    try:
        order = order_by_expert(routed, weights.num_experts, tiles.block_m)
        blocks = order.experts.shape[0]
        hidden = torch.empty((blocks * tiles.block_m, weights.width), dtype=x.dtype, device=x.device)
        gate_up(x, routed, order.experts, order.pairs, weights, None, tiles.gate_up, hidden, None)
    except BaseException:  # usually out of memory, after which the engine continues
        routed.reset_count()
        raise
    down, size = tiles.down, weights.size
    span = columns_at_once(rows * slots * out.element_size(), size, TILE * down.warps_n)
    for first in range(0, size, span):
        columns = min(span, size - first)
        parts = torch.empty((rows * slots, columns), dtype=out.dtype, device=out.device)
        down_of_order(hidden, routed, order, weights, down, first, parts)
        sum_choices(parts, routed.chosen, out, first // span, span, weights.held is not None)
    return out


def down_of_order(
    hidden: Tensor,
    routed: Routed,
    order: ExpertOrder,
    weights: PackedExpertWeights,
    down: PackedTiles,
    first: int,
    parts: Tensor,
) -> None:
    """Write columns `first` and following of the weighted down projections to parts [rows * slots, columns].

    hidden: [cells, width] inner activations, in the blocks of `order`.
    """
    columns = parts.shape[1]
    down_of_blocks[(triton.cdiv(columns, TILE * down.warps_n), order.experts.shape[0])](
        hidden,
        weights.down.codes,
        weights.down.scales,
        weights.down.zeros,
        weights.down.row_scale,
        weights.down_bias,
        parts,
        routed.weight,
        order.pairs,
        order.experts,
        first // TILE,
        SPAN=columns,
        ROW_TILES=down.row_tiles,
        WARPS_N=down.warps_n,
        **_common(hidden, weights, weights.down, down, weights.width, 1),
    )


def columns_at_once(bytes_of_column: int, size: int, step: int) -> int:
    """Return the maximum number of columns whose results fit in `MAX_PARTIAL_BYTES`: all, or a multiple of `step`."""
    if bytes_of_column * size <= MAX_PARTIAL_BYTES:
        return size
    return max(1, MAX_PARTIAL_BYTES // (bytes_of_column * step)) * step


def gate_up(
    x: Tensor,
    routed: Routed,
    experts: Tensor,
    pairs: Tensor | None,
    weights: PackedExpertWeights,
    workspace: Workspace | None,
    tiles: PackedTiles,
    hidden: Tensor,
    share: Tensor | None,
    raw: bool = False,
) -> None:
    """Write the inner activations of blocks to `hidden`; with `raw` gate and up themselves, [rows, 2 * width].

    x: [rows, size] in 16 bits, last stride 1.
    routed: the rows' experts and routing weights.
    experts: [blocks] int32 expert of each block.
    pairs: int32 (row, slot) pairs of the blocks' rows; None: each block has all rows.
    workspace: for sums shared by several programs; None if tiles.splits is 1.
    hidden: [rows of all blocks, width], written.
    share: [blocks * 8] float32, written without `pairs`: routing weights of the rows.
    """
    rows, slots = routed.chosen.shape
    size, activation = weights.size, weights.activation
    assert weights.is_raised or weights.gate_up.code != "e2m1"
    assert x.shape == (rows, size) and x.stride(1) == 1 and x.stride(0) % 8 == 0 and size % 8 == 0
    gate_up_of_blocks[(weights.width // TILE * tiles.splits, experts.shape[0])](
        x,
        weights.gate_up.codes,
        weights.gate_up.scales,
        weights.gate_up.zeros,
        weights.gate_up.row_scale,
        weights.gate_up_bias,
        weights.down_scale if pairs is None else None,
        hidden,
        share,
        routed.chosen,
        routed.weight,
        experts,
        pairs,
        routed.count,
        None if workspace is None else workspace.part,
        None if workspace is None else workspace.tickets,
        rows,
        x.stride(0) // 2,
        activation.alpha,
        activation.limit or 0.0,
        activation.shift,
        activation.cubic,
        SLOTS=slots,
        EXPERTS=weights.num_experts,
        BINS=bins_of(weights.num_experts),
        ROW_TILES=tiles.row_tiles,
        SPLITS=tiles.splits,
        LISTED=pairs is None,
        CLAMPED=activation.limit is not None,
        CUBED=activation.cubic != 0.0,
        RAW=raw,
        **_common(x, weights, weights.gate_up, tiles, size, tiles.splits),
    )


def _code(weights: PackedExpertWeights, weight: PackedWeight) -> str:
    """Return the name of the code in `decode_ptx`."""
    if weight.code != "e2m1":
        return weight.code
    return "e2m1 moved" if weights.has_moved_bits else "e2m1 / 2^126"


def _common(
    x: Tensor, weights: PackedExpertWeights, weight: PackedWeight, tiles: PackedTiles, k: int, splits: int
) -> dict[str, Any]:
    """Return arguments of both kernels. k: inputs of the product. splits: programs that share a sum."""
    return {
        "WIDTH": weights.width,
        "SIZE": weights.size,
        "GROUP": weight.group,
        "WARPS_K": tiles.warps_k,
        "STEPS": tiles.steps(k, splits),
        "STAGES": tiles.stages_for(weight),
        "CODE": _code(weights, weight),
        "SCALES": tiles.scales_weights,
        "TYPE": TL_TYPES[x.dtype],
        "SCALE_TYPE": TL_TYPES[weight.scales.dtype],
        "INTERPRETED": INTERPRETED,
        "num_warps": tiles.warps_n * tiles.warps_k,
        **pdl_wait(x.device),
    }
