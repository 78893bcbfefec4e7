"""A linear layer with a low-bit weight: stored in the checkpoint's format until `finish`, then packed for
`aerie.kernels.packed`. It is dequantised to the model's dtype if there is no low-bit product, or if a layer
multiplies by a part of the weight."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.gemm.host_weight import HostWeight
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.norm.activation import silu_mul
from aerie.kernels.packed.cuda.gated_mlp_tiles import gated_mlp_words
from aerie.kernels.packed.product import HostPackedProduct, PackedProduct, choose_product, gated_mlp
from aerie.kernels.packed.tiles import packed_workspace_size
from aerie.kernels.packed.weight import PackedWeight, dequantize
from aerie.kernels.span import Span
from aerie.workers.layers.linear_method import DenseLinearMethod, LinearMethod, LinearShape, Part


@dataclass(frozen=True)
class PackedPart:
    """Consecutive rows of a layer.

    gather: int32 [in_features of `weight`] input of each column, on the weight's device; None: all inputs in order,
        after `margins[0]` and before `margins[1]` zeros.
    """

    weight: PackedWeight
    gather: Tensor | None = None
    margins: tuple[int, int] = (0, 0)

    def inputs(self, x: Tensor) -> Tensor:
        """Return rows [rows, inputs] in the order of the weight's columns."""
        if self.gather is not None:
            return x.index_select(1, self.gather)
        return F.pad(x, self.margins) if any(self.margins) else x

    def dense(self, in_features: int, dtype: torch.dtype) -> Tensor:
        """Return [rows, in_features], exact in float32."""
        return self.in_order(dequantize(self.weight, dtype), in_features)

    def in_order(self, dense: Tensor, in_features: int) -> Tensor:
        """Return [rows, in_features] of the dequantised weight, exact in float32."""
        if self.gather is None:
            return dense[:, self.margins[0] : self.margins[0] + in_features]
        out = dense.new_zeros((dense.shape[0], in_features))
        return out.index_add_(1, self.gather, dense)  # padding adds zeros


class StoredMatrix(nn.Module, ABC):
    """A part's tensors on this rank, in the checkpoint's format."""

    @abstractmethod
    def load(self, kind: str, full: Tensor) -> None:
        """See `LinearMethod.load`."""

    @abstractmethod
    def fill_dummy(self, generator: torch.Generator) -> None:
        """Fill with random codes for which outputs are as large as inputs."""


class LinearLayout(ABC):
    """Storage format of linear layers with low-bit weights, as a plain value; its text is for the log."""

    @property
    @abstractmethod
    def all_kinds(self) -> tuple[str, ...]:
        """Return the tensors of a matrix, as last components of names."""

    @property
    @abstractmethod
    def optional(self) -> tuple[str, ...]:
        """Return the tensors that a checkpoint may lack."""

    @abstractmethod
    def stored(self, part: Part) -> StoredMatrix:
        """Allocate this rank's share of a matrix. Raises ValueError if the matrix cannot have this format."""

    @abstractmethod
    def pack(self, stored: Sequence[StoredMatrix], shape: LinearShape) -> list[PackedPart]:
        """Return the rows of a layer, in one part unless the order of inputs differs. stored: matrices by part of
        `shape`."""

    @abstractmethod
    def max_inputs(self, columns: Span) -> int:
        """Return the maximum number of inputs of a packed weight for a rank's `columns`."""

    @abstractmethod
    def layer_bytes(self, shape: LinearShape, scale_dtype: torch.dtype) -> int:
        """Return the bytes of a packed layer, before its order of inputs is known."""


@dataclass(frozen=True)
class _Product:
    """Multiplies by consecutive rows of a layer."""

    part: PackedPart
    product: PackedProduct

    @staticmethod
    def of(part: PackedPart, options: GEMMOptions) -> "_Product":
        product = choose_product(part.weight, options)
        return _Product(replace(part, weight=product.weight), product)  # which may have the numbers elsewhere

    def dense(self, in_features: int, dtype: torch.dtype) -> Tensor:
        return self.part.in_order(self.product.dense(dtype), in_features)

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        return self.product.multiply(self.part.inputs(x), bias, out)


class PackedLinear(DenseLinearMethod):
    """stored: the matrix of each part as stored in the checkpoint; empty after `finish`."""

    def __init__(self, shape: LinearShape, layout: LinearLayout) -> None:
        super().__init__(shape)
        self.kinds = layout.all_kinds
        self.layout, self._dtype = layout, torch.get_default_dtype()
        self.stored = nn.ModuleList(layout.stored(part) for part in shape.parts)
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
            return self.layout.layer_bytes(self.shape, self._dtype)
        return self.shape.out_features * self.shape.in_features * self._dtype.itemsize

    def dense_weight(self) -> Tensor:
        """Return the dense weight, dequantised at each call if it stays packed."""
        if self._dense is not None:
            return self._dense
        assert self._packed, "call finish first"
        return torch.cat([product.dense(self.shape.in_features, self._dtype) for product in self._packed])

    def _of(self, part: Part) -> StoredMatrix:
        stored = self.stored[self.shape.parts.index(part)]
        assert isinstance(stored, StoredMatrix)
        return stored

    def load(self, kind: str, part: Part, full: Tensor) -> None:
        self._of(part).load(kind, full)

    def fill_missing(self, kind: str, part: Part) -> bool:
        return kind in self.layout.optional

    def fill_dummy(self, generator: torch.Generator) -> None:
        for part in self.shape.parts:
            self._of(part).fill_dummy(generator)

    @property
    def host_weight(self) -> HostWeight | None:
        only = self._only()
        return only.stored if isinstance(only, HostPackedProduct) else super().host_weight

    def workspace_size(self) -> tuple[int, int]:
        inputs = self.layout.max_inputs(self.shape.parts[0].columns)
        rows = (self.shape.out_features, *(max(part.rows.size, 1) for part in self.shape.parts))
        cells, tickets = packed_workspace_size([(n, inputs) for n in rows])
        if len(self.shape.parts) == 2:  # gate and up projections
            tickets = max(tickets, gated_mlp_words(self.shape.in_features, self.shape.out_features // 2))
        return cells, tickets

    def finish(self, options: GEMMOptions) -> None:
        self._options = options
        if len(self.stored):
            packed = self.layout.pack([self._of(part) for part in self.shape.parts], self.shape)
            self._packed = [_Product.of(part, options) for part in packed]
            self.stored = nn.ModuleList()
        if not options.packed and any(type(each.product) is PackedProduct for each in self._packed):
            self._dense = self.dense_weight()
            self._packed = []
            super().finish(options)

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if self._dense is not None:
            return super().multiply(x, bias, out)
        self.check(x, bias, out)
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
        self.check(x)
        assert isinstance(x, Tensor), "fp8_inputs is None"
        if len(self._packed) > 1:
            return silu_mul(self.multiply(x, None))
        (only,) = self._packed
        return only.product.multiply_gated(only.part.inputs(x))

    def multiply_mlp(self, x: Tensor | Fp8Rows, down: LinearMethod, out: Tensor | None = None) -> Tensor:
        gate_up, other = self._only(), down._only() if isinstance(down, PackedLinear) else None
        if gate_up is None or other is None:
            return super().multiply_mlp(x, down, out)
        self.check(x)
        assert isinstance(x, Tensor), "fp8_inputs is None"
        assert self._options is not None, "call finish first"
        return gated_mlp(x, gate_up, other, self._options, out)

    def _only(self) -> PackedProduct | None:
        """Return the product with the whole weight; None if the order of inputs differs."""
        if len(self._packed) != 1:
            return None
        part = self._packed[0].part
        return self._packed[0].product if part.gather is None and not any(part.margins) else None
