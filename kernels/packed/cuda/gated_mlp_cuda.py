"""A gated MLP with int4 weights, with `gated_mlp.cu`: one launch, which reads the down projection's weights while it
multiplies gate and up."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from aerie.kernels.capability import num_multiprocessors
from aerie.kernels.cuda_source import Kernel, joined, load
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.packed.cuda.gated_mlp_tiles import GROUP, GatedMLPTiles, gated_mlp_tiles
from aerie.kernels.packed.product import PackedProduct
from aerie.kernels.packed.weight import PackedWeight

_NAME = "gated_mlp"


def gated_mlp(
    x: Tensor, gate_up: PackedProduct, down: PackedProduct, options: GEMMOptions, out: Tensor | None = None
) -> Tensor:
    """See `aerie.kernels.packed.product.gated_mlp`; for few rows."""
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
        _kernel(x.get_device(), tiles).launch(
            [tiles.blocks],
            (1, 1),
            *(x, rows, x.stride(0), gate_up.codes, gate_up.scales, down.codes, down.scales, out, workspace.tickets),
        )
    return out


@cache
def source() -> str:
    return joined(*(Path(__file__).with_name(name) for name in ("gated_mlp_units.cuh", f"{_NAME}.cu")))


@cache
def _kernel(device: int, tiles: GatedMLPTiles) -> Kernel:
    return load(device, source(), _NAME, tiles.defines(), tiles.threads, tiles.shared_bytes)
