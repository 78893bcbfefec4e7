"""silu(x G^T) * (x U^T) for 241 to 256 rows, by `gated_rows.cu`, whose tiles fill the multiprocessors' waves. Chosen by
`aerie.kernels.gemm.choice` where it is faster than cuBLAS and a kernel for silu (H200, 256 rows: 14,336 outputs of
4,096 inputs 99.5 instead of 105 us, of 8,192 inputs 175 instead of 186 us)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.capability import num_multiprocessors
from aerie.kernels.cuda_source import tensor_map, tensor_map_of
from aerie.kernels.gemm.blocks import cdiv
from aerie.kernels.gemm.skinny_triton import SkinnyGEMM
from aerie.kernels.gemm.tiles import (
    INPUT_STEP,
    MAX_WGMMA_ROWS,
    MIN_GATED_ROWS,
    gated_width,
)
from aerie.kernels.gemm.wgmma_cuda import WgmmaKernel, fits

KERNEL, _CLUSTER = WgmmaKernel("gated_rows", MAX_WGMMA_ROWS), (2, 1)


def gated_rows(x: Tensor, weight: Tensor, width: int, out: Tensor) -> Tensor:
    """Write silu(x G^T) * (x U^T) to `out`.

    x: [rows, K] bfloat16 or float16, 1 to 256 rows, last stride 1, rows at multiples of 16 bytes, K a multiple of 64.
    weight: [2 N, K] in x's dtype, G above U, contiguous, N a multiple of 8.
    width: rows of W in a tile, from `gated_width`.
    out: [rows, N] in x's dtype, contiguous.

    Reference: `aerie.kernels.norm.norm.silu_mul` of `torch.nn.functional.linear`.
    """
    (rows, n), k = out.shape, weight.shape[1]
    assert x.shape == (rows, k) and weight.shape[0] == 2 * n and x.dtype == weight.dtype == out.dtype
    assert 0 < rows <= MAX_WGMMA_ROWS and n % 8 == 0 and k % INPUT_STEP == 0
    assert fits(x) and weight.is_contiguous() and out.is_contiguous()
    # groups of 8 outputs, each of gate and of up rows: [N / 8, 2, 8, K]
    groups = weight.view(2, n // 8, 8, k).transpose(0, 1)
    maps = tensor_map(x, 64, MAX_WGMMA_ROWS // 2), tensor_map_of(groups, (width // 16, 2, 8, 64))
    pairs = min(cdiv(cdiv(2 * n, width), 2), num_multiprocessors(x.device) // 2)
    KERNEL.on(x, width).launch([2 * pairs], _CLUSTER, *maps, out, rows, n, k // INPUT_STEP)
    return out


@dataclass(frozen=True)
class GatedRowsGEMM(SkinnyGEMM):
    """`SkinnyGEMM`, except that `gated_rows` computes gated products of MIN_GATED_ROWS to 256 rows."""

    def __post_init__(self) -> None:
        KERNEL.compile_ahead(self.weight, self._width())

    def _width(self) -> int:
        width = gated_width(self.weight.shape[0] // 2)
        assert width is not None, "served"
        return width

    def multiply_gated(self, x: Tensor) -> Tensor:
        if not MIN_GATED_ROWS <= x.shape[0] <= MAX_WGMMA_ROWS or not fits(x):
            return super().multiply_gated(x)
        out = torch.empty((x.shape[0], self.weight.shape[0] // 2), dtype=x.dtype, device=x.device)
        return gated_rows(x, self.weight, self._width(), out)
