"""The experts of one row, with `one_row_experts.cu`: one launch, which reads the down projections' weights while it
multiplies gate and up."""

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
from aerie.kernels.packed.cuda.one_row_tiles import OneRowTiles, one_row_tiles
from aerie.kernels.packed.experts import PackedExpertWeights

_NAME = "one_row_experts"


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
    routed: with listed experts.
    weights: MXFP4 with moved bits (`aerie.kernels.packed.experts.moved`).
    workspace: at least `tiles.workspace`.
    out: [1, size] bfloat16, contiguous.
    """
    assert x.shape == out.shape == (1, tiles.size) and x.is_contiguous() and out.is_contiguous()
    assert x.dtype == out.dtype == torch.bfloat16 and weights.is_moved and x.data_ptr() % 16 == 0
    assert routed.used is not None and routed.used.shape[0] >= tiles.used and routed.chosen.shape == (1, tiles.slots)
    assert workspace.part.numel() >= tiles.workspace[0] and workspace.tickets.numel() >= tiles.workspace[1]
    activation = weights.activation
    _kernel(x.get_device(), tiles, activation).launch(
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
def source() -> str:
    return joined(*(Path(__file__).with_name(name) for name in ("one_row_units.cuh", f"{_NAME}.cu")))


@cache
def _kernel(device: int, tiles: OneRowTiles, activation: GatedActivation) -> Kernel:
    return load(device, source(), _NAME, tiles.defines(activation), tiles.threads, tiles.shared_bytes)
