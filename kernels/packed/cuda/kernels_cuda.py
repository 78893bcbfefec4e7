"""The implementation of `aerie.kernels.packed.product` by CUDA C++ kernels for Hopper and int4 weights: `few_rows.cu`
(up to 32 rows), `wide.cu` (17 to 32) and `many_rows.cu` (more). Triton kernels compute the other cases."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from aerie.kernels.capability import Capability
from aerie.kernels.cuda_source import Kernel, compile_ahead, joined, load, tensor_map, wgmma
from aerie.kernels.gemm.blocks import cdiv
from aerie.kernels.gemm.ordered_cuda import ROW_TILES
from aerie.kernels.gemm.workspace import Workspace
from aerie.kernels.packed.cuda.tiles import (
    MAX_ROWS,
    SHARED_SUMS,
    STEP,
    FewRowsTiles,
    ManyRowsTiles,
    Tiles,
    WideTiles,
    cuda_tiles,
)
from aerie.kernels.packed.product_triton import TritonPackedProduct, aligned
from aerie.kernels.packed.weight import TILE, PackedWeight

_NAMES = {FewRowsTiles: "few_rows", WideTiles: "wide", ManyRowsTiles: "many_rows"}  # names of kernels and their files


@cache
def source_of(tiles: Tiles, half: bool) -> str:
    """Return the source of the kernel for these tiles, including the functions that both kernels use."""
    generated = "" if isinstance(tiles, FewRowsTiles) else wgmma(tiles.block_m, half)
    shared = (ROW_TILES,) if isinstance(tiles, ManyRowsTiles) else ()
    return joined(*shared, Path(__file__).with_name(f"{_NAMES[type(tiles)]}.cu"), generated=generated)


def packed_cuda(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    workspace: Workspace,
    tiles: Tiles,
    out: Tensor,
    gated: bool = False,
) -> Tensor:
    """Write x W^T + b to `out`; gated: silu(x G^T) * (x U^T), where W is G above U.

    x: [rows, in_features] bfloat16 or float16, last stride 1, rows at multiples of 16 bytes; with
        `FewRowsTiles` at most 8 * `tiles.row_tiles` rows.
    weight: int4 without `row_scale`, in_features a multiple of 128, groups a multiple of 128 or all inputs, scales in
        x's dtype.
    bias: [N] in x's dtype, or None.
    workspace: at least `SHARED_SUMS`, which `ManyRowsTiles` need.
    out: [rows, N] or [rows, N / 2] in x's dtype, contiguous.

    Reference: `aerie.kernels.packed.product.packed_product`.
    """
    (rows, n), k = out.shape, weight.in_features
    assert x.shape == (rows, k) and x.stride(1) == 1 and x.stride(0) % 8 == 0 and k % STEP == 0
    assert x.dtype == out.dtype == weight.scales.dtype and out.is_contiguous() and weight.code == "int4"
    assert weight.group == k or weight.group % STEP == 0
    assert weight.out_features == n * (1 + gated) and not (gated and (n % TILE or bias is not None))
    if rows == 0:
        return out
    if isinstance(tiles, ManyRowsTiles):
        assert workspace.part.numel() >= SHARED_SUMS[0] and workspace.tickets.numel() >= SHARED_SUMS[1]
        grid, cluster = [2 * tiles.num_clusters(rows, weight.out_features, k // STEP)], (2, 1)
    else:
        grid, cluster = [cdiv(n, tiles.outputs // (1 + gated)), tiles.splits], (1, tiles.splits)
    inputs: list[object] = []
    if isinstance(tiles, FewRowsTiles):
        assert rows <= 8 * tiles.row_tiles
        inputs += [x, rows, x.stride(0)]
    else:
        inputs += [tensor_map(x, TILE, tiles.block_m), rows]
    if isinstance(tiles, WideTiles):
        grid.append(cdiv(rows, tiles.block_m))
    _kernel(tiles, x.get_device(), gated, x.dtype == torch.float16, weight.zeros is not None).launch(
        grid,
        cluster,
        *(*inputs, weight.codes, weight.scales, weight.zeros, bias, out, n),
        *(cdiv(weight.out_features, TILE), k // STEP, 0 if weight.group == k else weight.group // STEP),
        *((workspace.part, workspace.tickets) if isinstance(tiles, ManyRowsTiles) else ()),
    )
    return out


def compile_products(weight: PackedWeight) -> None:
    """Start to compile the kernels for every number of rows. A missing one would delay a step by a second."""
    compute = Capability.of(weight.codes.device).compute
    assert compute is not None
    half = weight.scales.dtype == torch.float16
    _compile_products(weight.out_features, weight.in_features, half, weight.zeros is not None, compute)


@cache
def _compile_products(n: int, k: int, half: bool, zeros: bool, compute: tuple[int, int]) -> None:
    for gated in (False, True) if n > k else (False,):  # gate and up projections have more outputs than inputs
        for rows in (1, 16, *range(32, MAX_ROWS + 1, 32)):  # each 32 rows have the same tiles
            tiles = cuda_tiles(rows, n, k, gated)
            if tiles is not None:
                compile_ahead(source_of(tiles, half), tiles.defines(gated, half, zeros), compute)


def _kernel(tiles: Tiles, device: int, gated: bool, half: bool, zeros: bool) -> Kernel:
    defines = tiles.defines(gated, half, zeros)
    return load(device, source_of(tiles, half), _NAMES[type(tiles)], defines, tiles.threads, tiles.shared_bytes(zeros))


@dataclass(frozen=True)
class CudaPackedProduct(TritonPackedProduct):
    """Fields: see `TritonPackedProduct`."""

    def __post_init__(self) -> None:
        if not self.deterministic:
            compile_products(self.weight)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        tiles = self._tiles(x, False)
        if tiles is None or (bias is not None and bias.dtype != x.dtype):
            return super().multiply(x, bias, out)
        if out is None:
            out = torch.empty((x.shape[0], self.weight.out_features), dtype=x.dtype, device=x.device)
        return packed_cuda(aligned(x), self.weight, bias, self.workspace, tiles, out)

    def multiply_gated(self, x: Tensor) -> Tensor:
        tiles = self._tiles(x, True)
        if tiles is None:
            return super().multiply_gated(x)
        out = torch.empty((x.shape[0], self.weight.out_features // 2), dtype=x.dtype, device=x.device)
        return packed_cuda(aligned(x), self.weight, None, self.workspace, tiles, out, gated=True)

    def _tiles(self, x: Tensor, gated: bool) -> Tiles | None:
        if x.dtype != self.weight.scales.dtype or self.deterministic:
            return None
        return cuda_tiles(x.shape[0], self.weight.out_features, self.weight.in_features, gated)
