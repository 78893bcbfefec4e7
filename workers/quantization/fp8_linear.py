"""A linear layer whose weight is FP8. Where the device multiplies FP8 and the kernels can read how scales lie, weights
stay as they are, and the layer's inputs are rounded to FP8 too, row by row; elsewhere `finish` makes what the weights
mean, in the model's type."""

import logging
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workers.layers.gemm import GEMMOptions
from workers.layers.linear_method import DenseLinearMethod, LinearShape, Part
from workers.layers.weighted import check_shape
from workers.ops.fp8.rows import Fp8Inputs, Fp8Rows
from workers.quantization.fp8_weight import (
    DUMMY_SCALE,
    FP8,
    Fp8Scheme,
    checked,
    dequantised,
    empty,
    fill_dummy,
    kernel_scales,
    rows_of,
    unreadable,
)

if TYPE_CHECKING:
    from workers.ops.fp8.tiles import Fp8AheadTiles, Fp8Matrix
    from workers.ops.gemm.skinny_triton import Workspace

logger = logging.getLogger(__name__)
# Of more rows a launch of its own is faster: 3.97 in place of 4.03 ms a round of four rows (Llama-3.1-8B, H200).
ROWS_ROUNDED_BY_PRODUCTS = 1


class Fp8Linear(DenseLinearMethod):
    """weight: [out_features, in_features] float8_e4m3fn; None once it is finished where nothing multiplies FP8.
    scales: of each part's whole matrix, float32."""

    def __init__(self, shape: LinearShape, scheme: Fp8Scheme) -> None:
        super().__init__(shape)
        assert not shape.padding, "a vocabulary head is left unquantised"
        self.kinds = ("weight", scheme.kind)
        self.scheme, self._dtype = scheme, torch.get_default_dtype()
        self.weight: nn.Parameter | None = empty(shape.out_features, shape.in_features, dtype=FP8)
        self.scales = nn.ParameterList(empty(*scheme.num_scales(part), dtype=torch.float32) for part in shape.parts)
        self._dense: Tensor | None = None
        self._product: Fp8Product | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def dense_weight(self) -> Tensor:
        """Made anew at each call where the weight stays FP8; for layers that multiply by a part of it."""
        return self._dequantised() if self._dense is None else self._dense

    def weight_and_scales(self) -> tuple[Tensor, Tensor]:
        """As kernels read them; where they can (`unreadable`)."""
        assert self.weight is not None, "is dequantised"
        return self.weight.data, kernel_scales([scale.data for scale in self.scales], self.shape.parts, self.scheme)

    def load(self, kind: str, part: Part, full: Tensor) -> None:
        assert self.weight is not None, "is finished"
        if kind == "weight":
            rows_of(self.weight, part).copy_(part.cut(checked(full)))
        else:
            check_shape(full, self.scheme.num_scales(part))
            self.scales[self.shape.parts.index(part)].data.copy_(full)

    def fill_dummy(self, generator: torch.Generator) -> None:
        assert self.weight is not None, "is finished"
        fill_dummy(self.weight.data, generator)
        for scale in self.scales:
            scale.data.fill_(DUMMY_SCALE)

    def finish(self, options: GEMMOptions) -> None:
        if self.weight is None:
            super().finish(options)
            return
        reason = unreadable(self.shape.parts, self.scheme)
        if options.fp8 and reason is None:
            self._product = self._chosen_product(options)
            return
        if options.fp8:
            logger.warning("weights of FP8 [%d, %d] are dequantised: %s", *self.weight.shape, reason)
        dense = self._dequantised()
        self.weight, self._dense = None, dense
        super().finish(options)

    def _chosen_product(self, options: GEMMOptions) -> "Fp8Product":
        from workers.ops.fp8.tiles import Fp8Matrix

        assert options.workspace is not None, "comes with fp8"
        matrix = Fp8Matrix(*self.weight_and_scales())
        return Fp8Product(matrix, options.workspace, options.deterministic, self._dtype)

    def _dequantised(self) -> Tensor:
        assert self.weight is not None
        dense = torch.empty(self.weight.shape, dtype=self._dtype, device=self.weight.device)
        for part, scale in zip(self.shape.parts, self.scales, strict=True):
            block = self.scheme.block_of(part)
            rows_of(dense, part).copy_(dequantised(rows_of(self.weight, part), scale.data, part, block, self._dtype))
        return dense

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        return None if self._product is None else self._product.inputs

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if self._product is None:
            return super().multiply(x, bias, out)
        return self._product.multiply(x, bias, out)

    def multiply_apart(self, x: Tensor | Fp8Rows) -> Tensor | None:
        return None if self._product is None else self._product.multiply_apart(x)

    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        if self._product is None:
            return super().multiply_gated(x)
        return self._product.multiply_gated(x, wanted)


@dataclass(frozen=True)
class Fp8Product:
    """Which kernels multiply rows by a weight in FP8. dtype: of results, and of rows that are not FP8, 16 bits.
    deterministic: a row's result must not depend on the rows beside it."""

    weight: "Fp8Matrix"
    workspace: "Workspace"
    deterministic: bool
    dtype: torch.dtype

    @cached_property
    def inputs(self) -> Fp8Inputs:
        from workers.ops.fp8.tiles import MAX_ROWS

        return Fp8Inputs(self.weight.by_group, sys.maxsize if self.deterministic else MAX_ROWS)

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """[rows, N] for x [rows, K]; in the memory `out` if it is given."""
        from workers.ops.fp8.gemm_ahead_triton import fp8_gemm_ahead
        from workers.ops.fp8.gemm_triton import fp8_fixed_rows, fp8_gemm
        from workers.ops.fp8.gemm_wide_triton import fp8_gemm_wide
        from workers.ops.fp8.tiles import MIN_WIDE_ROWS, fp8_gemm_tiles, fp8_wide_tiles, rounding_columns

        weight = self.weight
        values = x if isinstance(x, Tensor) else x.values
        rows, n = values.shape[0], weight.values.shape[0]
        if out is None:
            out = torch.empty((rows, n), dtype=self.dtype, device=values.device)
        is_wide = weight.by_group and rows >= MIN_WIDE_ROWS
        tiles = None if self.deterministic or is_wide else fp8_gemm_tiles(rows, *weight.values.shape)
        if tiles is not None:
            rounds = isinstance(x, Tensor) and rows <= ROWS_ROUNDED_BY_PRODUCTS
            rounds = rounds and rounding_columns(rows, weight, tiles) > 0
            ahead = None if rounds else self._ahead_tiles(rows)
            if ahead is not None:
                fp8_gemm_ahead(self._rounded(x), weight, bias, self.workspace, ahead, out)
            else:
                fp8_gemm(x if rounds else self._rounded(x), weight, bias, self.workspace, tiles, out)
            return out
        if self.deterministic:
            return fp8_fixed_rows(self._rounded(x), weight, bias, self.workspace, out)
        if weight.by_group or n % 16 or self.dtype != torch.bfloat16:
            wide = fp8_wide_tiles(rows, *weight.values.shape)
            return fp8_gemm_wide(self._rounded(x), weight, bias, self.workspace, wide, out)
        return _scaled_mm(self._rounded(x), weight, bias, out)

    def multiply_apart(self, x: Tensor | Fp8Rows) -> Tensor | None:
        """See `LinearMethod.multiply_apart`."""
        from workers.ops.fp8.gemm_ahead_triton import fp8_gemm_ahead

        values, rows = self.weight.values, (x if isinstance(x, Tensor) else x.values).shape[0]
        tiles = self._ahead_tiles(rows)
        if tiles is None or tiles.splits == 1:
            return None
        out = torch.empty((tiles.splits, rows, values.shape[0]), dtype=torch.float32, device=values.device)
        fp8_gemm_ahead(self._rounded(x), self.weight, None, self.workspace, tiles, out)
        return out

    def _ahead_tiles(self, rows: int) -> "Fp8AheadTiles | None":
        """Of a product that reads all of its weight before its rows are there; None where none does."""
        from workers.ops.fp8.tiles import fp8_ahead_tiles

        if self.deterministic or not self.weight.by_group:
            return None
        return fp8_ahead_tiles(rows, *self.weight.values.shape)

    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        from workers.ops.activation import silu_mul
        from workers.ops.fp8.gemm_triton import fp8_gemm
        from workers.ops.fp8.rows import Fp8Rows, quantize_rows
        from workers.ops.fp8.tiles import fp8_gated_tiles

        (n, k), rows = self.weight.values.shape, (x if isinstance(x, Tensor) else x.values).shape[0]
        out: Tensor | Fp8Rows
        if not self.deterministic:
            tiles = fp8_gated_tiles(rows, n, k, for_fp8=True) if wanted is not None and wanted.by_group else None
            if tiles is not None:
                out = Fp8Rows.empty(rows, n // 2, True, False, self.weight.values.device)
            else:
                tiles = fp8_gated_tiles(rows, n, k)
                out = torch.empty((rows, n // 2), dtype=self.dtype, device=self.weight.values.device)
            if tiles is not None:
                fp8_gemm(self._rounded(x), self.weight, None, self.workspace, tiles, out, gated=True, result=self.dtype)
                return out
        both = self.multiply(x, None)
        if wanted is None:
            return silu_mul(both)
        return quantize_rows(both, wanted.by_group, rows_together=rows > wanted.many, gated=True)

    def _rounded(self, x: Tensor | Fp8Rows) -> Fp8Rows:
        from workers.ops.fp8.rows import quantize_rows

        if not isinstance(x, Tensor):
            return x
        return quantize_rows(x, self.inputs.by_group, rows_together=x.shape[0] > self.inputs.many)


def _scaled_mm(x: Fp8Rows, weight: "Fp8Matrix", bias: Tensor | None, out: Tensor) -> Tensor:
    """The library's, for scales of rows and outputs and results in bfloat16."""
    torch._scaled_mm(
        x.values, weight.values.t(), scale_a=x.scales, scale_b=weight.scales.t(), out_dtype=out.dtype, out=out
    )
    return out if bias is None else out.add_(bias)
