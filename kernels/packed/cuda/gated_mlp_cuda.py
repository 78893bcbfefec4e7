"""Gated MLPs in one launch, which reads the down projection's weights while it multiplies gate and up: int4 weights
with `gated_mlp.cu`, and the experts of one row with `one_row_experts.cu`."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from aerie.kernels.capability import num_multiprocessors
from aerie.kernels.cuda_source import Kernel, joined, load
from aerie.kernels.experts.gated import GatedActivation
from aerie.kernels.experts.route import Routed, RouterLogits
from aerie.kernels.experts.route_triton import route
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.packed.cuda.gated_mlp_tiles import GROUP, GatedMLPTiles, OneRowTiles, gated_mlp_tiles, one_row_tiles
from aerie.kernels.packed.experts import PackedExpertWeights
from aerie.kernels.packed.product import PackedProduct
from aerie.kernels.packed.weight import PackedWeight

_GATED_MLP = "gated_mlp"


def gated_mlp(
    x: Tensor, gate_up: PackedProduct, down: PackedProduct, options: GEMMOptions, out: Tensor | None = None
) -> Tensor:
    """Implement `aerie.kernels.packed.product.gated_mlp` for few rows: return (silu(x G^T) * (x U^T)) D^T."""
    assert options.workspace is not None, "serves"
    tiles = gated_mlp_tiles(x.shape[1], down.weight.in_features, x.shape[0], num_multiprocessors(x.device))
    assert tiles is not None, "serves"
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    return gated_mlp_of(x, gate_up.weight, down.weight, options.workspace, tiles, out)


def gated_mlp_of(
    x: Tensor, gate_up: PackedWeight, down: PackedWeight, workspace: Workspace, tiles: GatedMLPTiles, out: Tensor
) -> Tensor:
    """Write (silu(x G^T) * (x U^T)) D^T to `out`.

    x: [rows, size] bfloat16, at most `tiles.rows` rows at multiples of 16 bytes, last stride 1.
    gate_up, down: int4 [2 width, size] and [size, width] in groups of 128, without zeros or `row_scale`; scales
        bfloat16.
    workspace: at least `tiles.words` tickets.
    out: [rows, size] bfloat16, contiguous.
    """
    rows, size, width = x.shape[0], tiles.size, tiles.width
    assert x.shape == out.shape == (rows, size) and rows <= tiles.rows and out.is_contiguous()
    assert x.stride(1) == 1 and (x.stride(0) % 8 == 0 or rows == 1) and x.data_ptr() % 16 == out.data_ptr() % 4 == 0
    assert x.dtype == out.dtype == torch.bfloat16 and workspace.tickets.numel() >= tiles.words
    for weight, shape in ((gate_up, (2 * width, size)), (down, (size, width))):
        assert weight.code == "int4" and (weight.out_features, weight.in_features) == shape and weight.group == GROUP
        assert weight.zeros is None and weight.row_scale is None and weight.scales.dtype == torch.bfloat16
    if rows:
        _gated_mlp_kernel(x.get_device(), tiles).launch(
            [tiles.blocks],
            (1, 1),
            *(x, rows, x.stride(0), gate_up.codes, gate_up.scales, down.codes, down.scales, out, workspace.tickets),
        )
    return out


@cache
def gated_mlp_source() -> str:
    return joined(*(Path(__file__).with_name(name) for name in ("gated_mlp_units.cuh", f"{_GATED_MLP}.cu")))


@cache
def _gated_mlp_kernel(device: int, tiles: GatedMLPTiles) -> Kernel:
    return load(device, gated_mlp_source(), _GATED_MLP, tiles.defines(), tiles.threads, tiles.shared_bytes)


_EXPERTS = "one_row_experts"


def packed_expert_products(
    x: Tensor, router: RouterLogits, weights: PackedExpertWeights, options: GEMMOptions, out: Tensor | None = None
) -> Tensor:
    """See `aerie.kernels.packed.experts.packed_expert_products`; for one row."""
    assert options.workspace is not None, "serves"
    out = torch.empty((1, weights.size), dtype=x.dtype, device=x.device) if out is None else out
    routed = route(router, 0, options.workspace.tickets, True, weights.held)
    tiles = one_row_tiles(weights.sizes(routed.chosen.shape[1]), num_multiprocessors(x.device))
    assert tiles is not None, "serves"
    return one_row_experts(x, routed, weights, options.workspace, tiles, out)


def one_row_experts(
    x: Tensor, routed: Routed, weights: PackedExpertWeights, workspace: Workspace, tiles: OneRowTiles, out: Tensor
) -> Tensor:
    """Write the weighted sum of the row's experts to `out`; zeros for a padding row.

    x: [1, size] bfloat16, contiguous, aligned to 16 bytes.
    routed: with `used`, the list of experts in use.
    weights: MXFP4, with codes in the bit order of `aerie.kernels.packed.experts.with_moved_bits`.
    workspace: at least `tiles.workspace`.
    out: [1, size] bfloat16, contiguous.
    """
    assert x.shape == out.shape == (1, tiles.size) and x.is_contiguous() and out.is_contiguous()
    assert x.dtype == out.dtype == torch.bfloat16 and weights.has_moved_bits and x.data_ptr() % 16 == 0
    assert routed.used is not None and routed.used.shape[0] >= tiles.used and routed.chosen.shape == (1, tiles.slots)
    assert workspace.part.numel() >= tiles.workspace[0] and workspace.tickets.numel() >= tiles.workspace[1]
    activation = weights.activation
    _experts_kernel(x.get_device(), tiles, activation).launch(
        [tiles.blocks],
        (1, 1),
        *(x, routed.used, routed.num_used, routed.chosen, routed.weight),
        *(weights.gate_up.codes, weights.gate_up.scales, weights.gate_up_bias),
        *(weights.down.codes, weights.down.scales, weights.down_bias),
        *(out, workspace.part, workspace.tickets),
        *(activation.alpha, activation.limit or 0.0, activation.shift, activation.cubic),
    )
    return out


@cache
def experts_source() -> str:
    return joined(*(Path(__file__).with_name(name) for name in ("one_row_units.cuh", f"{_EXPERTS}.cu")))


@cache
def _experts_kernel(device: int, tiles: OneRowTiles, activation: GatedActivation) -> Kernel:
    return load(device, experts_source(), _EXPERTS, tiles.defines(activation), tiles.threads, tiles.shared_bytes)
