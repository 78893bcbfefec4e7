"""The implementation of `aerie.kernels.packed.product` by CUDA C++ kernels for Hopper (`kernels_cuda`). Triton
kernels compute the other cases."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.packed.cuda.kernels_cuda import compile_products, packed_cuda
from aerie.kernels.packed.cuda.tiles import Tiles, cuda_tiles
from aerie.kernels.packed.product_triton import TritonPackedProduct, aligned


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
