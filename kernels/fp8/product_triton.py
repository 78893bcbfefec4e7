"""The Triton implementation of `aerie.kernels.fp8.product`: chooses kernels by the number of rows and the kind of
scales."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from aerie.kernels.fp8.gemm_ahead_triton import fp8_gemm_ahead
from aerie.kernels.fp8.gemm_triton import fp8_gemm
from aerie.kernels.fp8.gemm_wide_triton import fp8_gemm_wide
from aerie.kernels.fp8.product import Fp8Product
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.fp8.rows_triton import quantize_rows
from aerie.kernels.fp8.tiles import (
    MAX_ROWS,
    MIN_WIDE_ROWS,
    Fp8AheadTiles,
    Fp8Matrix,
    fp8_ahead_tiles,
    fp8_gated_tiles,
    fp8_gemm_tiles,
    fp8_ordered_gated_tiles,
    fp8_ordered_tiles,
    fp8_ordered_wide_tiles,
    fp8_wide_tiles,
    rounding_columns,
)
from aerie.kernels.gemm.workspace import Workspace
from aerie.kernels.norm.activation import silu_mul


@dataclass(frozen=True)
class TritonFp8Product(Fp8Product):
    """`aerie.kernels.fp8.product`."""

    weight: Fp8Matrix
    workspace: Workspace
    deterministic: bool
    dtype: torch.dtype

    @cached_property
    def inputs(self) -> Fp8Inputs:
        return Fp8Inputs(self.weight.by_group, MAX_ROWS)

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        weight = self.weight
        values = x if isinstance(x, Tensor) else x.values
        rows, n = values.shape[0], weight.values.shape[0]
        if out is None:
            out = torch.empty((rows, n), dtype=self.dtype, device=values.device)
        is_wide = weight.by_group and rows >= MIN_WIDE_ROWS
        if self.deterministic:
            return self._multiply_in_order(x, bias, out, is_wide)
        tiles = None if is_wide else fp8_gemm_tiles(rows, *weight.values.shape)
        if tiles is not None:
            # for more rows, a separate launch is faster: 3.97 instead of 4.03 ms per round of four rows (Llama-3.1-8B)
            rounds = isinstance(x, Tensor) and rows == 1 and rounding_columns(weight, tiles) > 0
            ahead = None if rounds else self._ahead_tiles(rows)
            if ahead is not None:
                fp8_gemm_ahead(self._rounded(x), weight, bias, self.workspace, ahead, out)
            else:
                fp8_gemm(x if rounds else self._rounded(x), weight, bias, self.workspace, tiles, out)
            return out
        if weight.by_group or n % 16 or self.dtype != torch.bfloat16:
            wide = fp8_wide_tiles(rows, *weight.values.shape)
            return fp8_gemm_wide(self._rounded(x), weight, bias, self.workspace, wide, out)
        return _scaled_mm(self._rounded(x), weight, bias, out)

    def _multiply_in_order(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor, is_wide: bool) -> Tensor:
        """Multiply so that a row's bits do not depend on the number of rows."""
        rows, shape = out.shape[0], self.weight.values.shape
        tiles = None if is_wide else fp8_ordered_tiles(rows, *shape)
        if tiles is None:
            wide = fp8_ordered_wide_tiles(rows, *shape)
            return fp8_gemm_wide(self._rounded(x), self.weight, bias, self.workspace, wide, out)
        rounds = isinstance(x, Tensor) and rows == 1 and rounding_columns(self.weight, tiles) > 0
        fp8_gemm(x if rounds else self._rounded(x), self.weight, bias, self.workspace, tiles, out)
        return out

    def multiply_apart(self, x: Tensor | Fp8Rows) -> Tensor | None:
        values, rows = self.weight.values, (x if isinstance(x, Tensor) else x.values).shape[0]
        tiles = self._ahead_tiles(rows)
        if tiles is None or tiles.splits == 1:
            return None
        out = torch.empty((tiles.splits, rows, values.shape[0]), dtype=torch.float32, device=values.device)
        fp8_gemm_ahead(self._rounded(x), self.weight, None, self.workspace, tiles, out)
        return out

    def _ahead_tiles(self, rows: int) -> Fp8AheadTiles | None:
        """Return tiles of the kernel that reads all of W before the wait; None if W does not fit."""
        if self.deterministic or not self.weight.by_group:
            return None
        return fp8_ahead_tiles(rows, *self.weight.values.shape)

    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        (n, k), rows = self.weight.values.shape, (x if isinstance(x, Tensor) else x.values).shape[0]
        out: Tensor | Fp8Rows
        choose = fp8_ordered_gated_tiles if self.deterministic else fp8_gated_tiles
        for_fp8 = wanted is not None and wanted.by_group
        tiles = choose(rows, n, k, True) if for_fp8 else None
        if tiles is not None:
            out = Fp8Rows.empty(rows, n // 2, True, False, self.weight.values.device)
        else:
            tiles = choose(rows, n, k, False)
            out = torch.empty((rows, n // 2), dtype=self.dtype, device=self.weight.values.device)
        if tiles is not None:
            fp8_gemm(self._rounded(x), self.weight, None, self.workspace, tiles, out, gated=True, result=self.dtype)
            return out
        both = self.multiply(x, None)
        if wanted is None:
            return silu_mul(both)
        return quantize_rows(both, wanted.by_group, rows_together=rows > wanted.many, gated=True)

    def _rounded(self, x: Tensor | Fp8Rows) -> Fp8Rows:
        if not isinstance(x, Tensor):
            return x
        return quantize_rows(x, self.inputs.by_group, rows_together=x.shape[0] > self.inputs.many)


def _scaled_mm(x: Fp8Rows, weight: Fp8Matrix, bias: Tensor | None, out: Tensor) -> Tensor:
    """Multiply with torch, with scales per row and per output and bfloat16 results."""
    torch._scaled_mm(
        x.values, weight.values.t(), scale_a=x.scales, scale_b=weight.scales.t(), out_dtype=out.dtype, out=out
    )
    return out if bias is None else out.add_(bias)
