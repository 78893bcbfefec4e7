"""A linear layer whose weight has 4 or 8 bits: packed for `workers.ops.packed` once it is loaded, or dequantised to the
model's dtype where there is no product of few bits, or where a layer multiplies by a part of the weight."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.layers.linear_method import DenseLinearMethod, LinearShape, Part
from workers.ops.activation import silu_mul
from workers.ops.fp8.rows import Fp8Inputs, Fp8Rows
from workers.ops.gemm.workspace import GEMMOptions
from workers.ops.packed.product import PackedProduct, choose_product
from workers.ops.packed.tiles import packed_workspace_size
from workers.quantization.integers.format import IntFormat
from workers.quantization.integers.packing import PackedPart, max_inputs, pack_parts, packed_bytes
from workers.quantization.integers.stored import StoredInt


@dataclass(frozen=True)
class _Product:
    """Multiplies by consecutive rows of a layer."""

    part: PackedPart
    product: PackedProduct

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        return self.product.multiply(self.part.gathered(x), bias, out)


class IntLinear(DenseLinearMethod):
    """stored: per part; empty after `finish`."""

    def __init__(self, shape: LinearShape, layout: IntFormat) -> None:
        super().__init__(shape)
        self.kinds = layout.kinds
        self.layout, self._dtype = layout, torch.get_default_dtype()
        self.stored = nn.ModuleList(StoredInt(layout, part) for part in shape.parts)
        self._packed: list[_Product] = []
        self._dense: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def format(self) -> str:
        return str(self.layout)

    def num_bytes(self, options: GEMMOptions) -> int:
        if options.packed:
            return packed_bytes(self.shape, self.layout, self._dtype)
        return self.shape.out_features * self.shape.in_features * self._dtype.itemsize

    def dense_weight(self) -> Tensor:
        """Dequantised at each call if the weight stays packed."""
        if self._dense is not None:
            return self._dense
        assert self._packed, "call finish first"
        return torch.cat([product.part.dense(self.shape.in_features, self._dtype) for product in self._packed])

    def _of(self, part: Part) -> StoredInt:
        stored = self.stored[self.shape.parts.index(part)]
        assert isinstance(stored, StoredInt)
        return stored

    def load(self, kind: str, part: Part, full: Tensor) -> None:
        self._of(part).load(kind, full)

    def fill_missing(self, kind: str, part: Part) -> bool:
        return kind in self.layout.optional

    def fill_dummy(self, generator: torch.Generator) -> None:
        for part in self.shape.parts:
            self._of(part).fill_dummy(generator)

    def workspace_size(self) -> tuple[int, int]:
        inputs = max_inputs(self.shape.parts[0].columns, self.layout)
        rows = (self.shape.out_features, *(max(part.rows.size, 1) for part in self.shape.parts))
        return packed_workspace_size([(n, inputs) for n in rows])

    def finish(self, options: GEMMOptions) -> None:
        if len(self.stored):
            packed = pack_parts([self._of(part).matrix() for part in self.shape.parts], self.shape, self.layout)
            self._packed = [_Product(part, choose_product(part.weight, options)) for part in packed]
            self.stored = nn.ModuleList()
        if not options.packed:
            self._dense = self.dense_weight()
            self._packed = []
            super().finish(options)

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if self._dense is not None:
            return super().multiply(x, bias, out)
        assert isinstance(x, Tensor), "fp8_inputs is None"
        if len(self._packed) == 1:
            return self._packed[0].multiply(x, bias, out)
        products, first = [], 0
        for product in self._packed:
            end = first + product.part.weight.out_features
            products.append(product.multiply(x, None if bias is None else bias[first:end], None))
            first = end
        return torch.cat(products, 1) if out is None else torch.cat(products, 1, out=out)

    def multiply_gated(self, x: Tensor | Fp8Rows, wanted: Fp8Inputs | None = None) -> Tensor | Fp8Rows:
        if self._dense is not None:
            return super().multiply_gated(x, wanted)
        assert isinstance(x, Tensor), "fp8_inputs is None"
        if len(self._packed) > 1:
            return silu_mul(self.multiply(x, None))
        (only,) = self._packed
        return only.product.multiply_gated(only.part.gathered(x))
