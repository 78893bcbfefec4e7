"""The Triton implementation of `aerie.kernels.packed.product`: chooses kernels by the number of rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.norm.activation import silu_mul
from aerie.kernels.packed.blocks_triton import packed_blocks
from aerie.kernels.packed.dequantize_triton import dequantize_rows
from aerie.kernels.packed.order_rows_triton import order_rows
from aerie.kernels.packed.product import PackedProduct
from aerie.kernels.packed.stream_triton import packed_stream
from aerie.kernels.packed.tiles import (
    FIXED_ROWS,
    BlockTiles,
    StreamTiles,
    fixed_tiles,
    outputs_at_once,
    product_tiles,
)
from aerie.kernels.packed.weight import PackedWeight


@dataclass(frozen=True)
class TritonPackedProduct(PackedProduct):
    """workspace: at least `packed_workspace_size` for the weight's shape.
    deterministic: whether a row's bits must depend on that row alone.
    """

    workspace: Workspace
    deterministic: bool

    @classmethod
    def of(cls, weight: PackedWeight, options: GEMMOptions) -> "TritonPackedProduct":
        """Implement `aerie.kernels.packed.product.choose_product`."""
        assert options.workspace is not None, "served"
        return cls(weight, options.workspace, options.deterministic)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        rows, n, k = x.shape[0], self.weight.out_features, self.weight.in_features
        if out is None:
            out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
        if self.deterministic:
            return self._in_passes(x, bias, out)
        tiles = product_tiles(rows, n, k, False, self.weight.code, self.weight.group)
        return self._dequantized(x, bias, out) if tiles is None else self._in_tiles(x, bias, out, tiles, False)

    def multiply_gated(self, x: Tensor) -> Tensor:
        rows, n, k = x.shape[0], self.weight.out_features, self.weight.in_features
        if self.deterministic:
            return silu_mul(self.multiply(x, None))
        tiles = product_tiles(rows, n, k, True, self.weight.code, self.weight.group)
        if tiles is None:
            return silu_mul(self.multiply(x, None))
        out = torch.empty((rows, n // 2), dtype=x.dtype, device=x.device)
        return self._in_tiles(x, None, out, tiles, True)

    def _in_tiles(
        self, x: Tensor, bias: Tensor | None, out: Tensor, tiles: StreamTiles | BlockTiles, gated: bool
    ) -> Tensor:
        x = aligned(x)
        if isinstance(tiles, StreamTiles):
            return packed_stream(x, self.weight, bias, self.workspace, tiles, out, gated)
        ordered = x if tiles.direct else order_rows(x)
        return packed_blocks(ordered, self.weight, bias, self.workspace, tiles, out, gated)

    def _in_passes(self, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Multiply any number of rows, up to FIXED_ROWS per launch, in one order of additions."""
        for first in range(0, x.shape[0], FIXED_ROWS):
            rows = slice(first, min(first + FIXED_ROWS, x.shape[0]))
            tiles = fixed_tiles(rows.stop - first, *self._shape)
            packed_stream(aligned(x[rows]), self.weight, bias, self.workspace, tiles, out[rows])
        return out

    def _dequantized(self, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Multiply many rows: dequantise some outputs at a time, and multiply them with cuBLAS while they are in L2."""
        n, k = self._shape
        step = outputs_at_once(n, k)
        scratch = self.workspace.part.view(x.dtype)
        for first in range(0, n, step):
            end = min(n, first + step)
            some = dequantize_rows(self.weight, first, scratch[: (end - first) * k].view(end - first, k))
            if bias is None:
                torch.mm(x, some.t(), out=out[:, first:end])
            else:
                torch.addmm(bias[first:end], x, some.t(), out=out[:, first:end])
        return out

    @property
    def _shape(self) -> tuple[int, int]:
        return self.weight.out_features, self.weight.in_features


def aligned(x: Tensor) -> Tensor:
    """Return x, copied unless its rows are aligned to 16 bytes."""
    return x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
