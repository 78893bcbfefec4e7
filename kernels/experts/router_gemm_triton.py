"""The Triton implementation of `aerie.kernels.experts.router_gemm`."""

from dataclasses import replace

import torch
import triton
from torch import Tensor

from aerie.kernels.capability import MULTIPROCESSORS
from aerie.kernels.gemm.skinny_triton import skinny_gemm
from aerie.kernels.gemm.tiles import FIXED_ROWS, MAX_ROWS, SkinnyGemmTiles
from aerie.kernels.gemm.workspace import Workspace

_MAX_ROWS = 512  # more rows use cuBLAS
_BLOCK_N, _BLOCK_K = 64, 128  # BLOCK_K is 64 if 128 does not divide K
_MAX_SPLITS = 16  # maximum programs that share a sum


def router_tiles(rows: int, n: int, k: int) -> SkinnyGemmTiles:
    """Return tiles for a router's small N and large K: K is split until programs fill the device. For up to 16 rows
    each program reads all of its weights before the wait, if they fit."""
    block_m = min(MAX_ROWS, max(16, triton.next_power_of_2(rows)))
    whole = triton.next_power_of_2(triton.cdiv(k, _MAX_SPLITS))
    if block_m == 16 and k % whole == 0 and 128 <= whole <= 512:
        return SkinnyGemmTiles(block_m, _BLOCK_N, whole, k // whole, True, stages=1, warps=4)
    block_k = _BLOCK_K if k % _BLOCK_K == 0 else 64
    steps, tiles = k // block_k, triton.cdiv(n, _BLOCK_N) * triton.cdiv(rows, block_m)
    splits = max(d for d in range(1, _MAX_SPLITS + 1) if steps % d == 0 and (d == 1 or d * tiles <= MULTIPROCESSORS))
    ahead = block_m == 16 and steps > splits
    return SkinnyGemmTiles(block_m, _BLOCK_N, block_k, splits, ahead, stages=4, warps=4)


def ordered_router_tiles(rows: int, n: int, k: int) -> SkinnyGemmTiles:
    """Return tiles that add in one order for any number of rows: that of FIXED_ROWS."""
    tiles, few = router_tiles(FIXED_ROWS, n, k), router_tiles(rows, n, k)
    if rows <= 16 and few.splits == tiles.splits and few.block_k == few.span(k) == tiles.span(k):
        return few  # one step, in the order of columns
    return replace(tiles, block_m=min(FIXED_ROWS, max(16, triton.next_power_of_2(rows))))


def router_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, workspace: Workspace | None, deterministic: bool
) -> Tensor:
    """Implement `aerie.kernels.experts.router_gemm.router_gemm`: return x W^T + b."""
    assert workspace is not None
    rows, n = x.shape[0], weight.shape[0]
    if rows > _MAX_ROWS and not deterministic:
        logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return logits if bias is None else logits.add_(bias)
    tiles = ordered_router_tiles(rows, *weight.shape) if deterministic else router_tiles(rows, *weight.shape)
    out = torch.empty((tiles.splits, rows, n), dtype=torch.float32, device=x.device)
    return skinny_gemm(x, weight, bias, workspace, tiles, out)
