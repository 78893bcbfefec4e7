"""y = x W^T + b for 209 to 256 rows, by `split_k.cu`: each of two clusters has half of a tile's inputs (split K), and
one of them adds both sums; cuBLAS needs a second kernel for that. Chosen by `aerie.kernels.gemm.choice` for weights
of many inputs whose tiles fill one wave (H200, 256 rows, 4,096 outputs of 12,288 inputs: 46.4 instead of 48.5 us)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.cuda_source import tensor_map
from aerie.kernels.gemm.blocks import cdiv
from aerie.kernels.gemm.skinny_triton import SkinnyGEMM
from aerie.kernels.gemm.tiles import (
    INPUT_STEP,
    MAX_WGMMA_ROWS,
    MIN_SPLIT_ROWS,
    split_width,
)
from aerie.kernels.gemm.wgmma_cuda import WgmmaKernel, fits
from aerie.kernels.gemm.workspace import Workspace

KERNEL, _CLUSTER = WgmmaKernel("split_k", MAX_WGMMA_ROWS // 2), (2, 1)


def split_k(x: Tensor, weight: Tensor, bias: Tensor | None, workspace: Workspace, width: int, out: Tensor) -> Tensor:
    """Write x W^T + b to `out`.

    x: [rows, K] bfloat16 or float16, 1 to 256 rows, last stride 1, rows at multiples of 16 bytes, K a multiple of 64,
        at least 128.
    weight: [N, K] in x's dtype, contiguous, N a multiple of 8.
    bias: [N] in x's dtype, or None.
    workspace: workspace that is large enough for this shape.
    width: outputs of a tile, from `split_width`.
    out: [rows, N] in x's dtype, contiguous.

    Reference: `torch.nn.functional.linear`.
    """
    (rows, n), k = out.shape, weight.shape[1]
    assert x.shape == (rows, k) and weight.shape == (n, k) and x.dtype == weight.dtype == out.dtype
    assert 0 < rows <= MAX_WGMMA_ROWS and n % 8 == 0 and k % INPUT_STEP == 0 and k > INPUT_STEP
    assert fits(x) and weight.is_contiguous() and out.is_contiguous()
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    maps = tensor_map(x, 64, MAX_WGMMA_ROWS // 2), tensor_map(weight, 64, width // 2)
    KERNEL.on(x, width).launch(
        [4 * cdiv(n, width)],
        _CLUSTER,
        *maps,
        bias,
        out,
        workspace.part,
        workspace.tickets,
        rows,
        n,
        k // INPUT_STEP,
    )
    return out


@dataclass(frozen=True)
class SplitKGEMM(SkinnyGEMM):
    """`SkinnyGEMM`, except that `split_k` multiplies 209 to 256 rows."""

    def __post_init__(self) -> None:
        KERNEL.compile_ahead(self.weight, self._tile_width())

    def _tile_width(self) -> int:
        """Outputs of a tile."""
        width = split_width(*self.weight.shape)
        assert width is not None, "served"
        return width

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """See `SkinnyGEMM.multiply`. Other numbers of rows, and layouts that the kernel cannot read or write, go
        there."""
        served = MIN_SPLIT_ROWS <= x.shape[0] <= MAX_WGMMA_ROWS and fits(x)
        if not served or (out is not None and (out.dtype != x.dtype or out.dim() != 2 or not out.is_contiguous())):
            return super().multiply(x, bias, out)
        if out is None:
            out = torch.empty((x.shape[0], self.weight.shape[0]), dtype=x.dtype, device=x.device)
        return split_k(x, self.weight, bias, self.workspace, self._tile_width(), out)
