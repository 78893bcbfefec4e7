"""Linear layers with low-bit weights, stored in the checkpoint's format until `finish`, then packed for
`aerie.kernels.packed`; dequantised if there is no low-bit product, or if a layer multiplies by a part of the weight.
`PackedScheme` is the storage of one low-bit matrix, also for `packed_experts`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.gemm.host_weight import HostWeight
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.norm.norm import silu_mul
from aerie.kernels.packed.cuda.gated_mlp_tiles import gated_mlp_words
from aerie.kernels.packed.product import HostPackedProduct, PackedProduct, choose_product, gated_mlp
from aerie.kernels.packed.tiles import packed_workspace_size
from aerie.kernels.packed.weight import Code, PackedWeight, dequantize, empty, pack
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
        """Copy this rank's share of `full`, the checkpoint's tensor of a kind (`LinearMethod.load`)."""

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
    """A linear layer with a low-bit weight.

    stored: the matrix of each part as stored in the checkpoint; empty after `finish`.
    """

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
        """Return the scratch of the whole layer's product, or of one of its parts, which may be multiplied alone:
        float32 cells, and counters."""
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
        if not options.packed and any(type(weight.product) is PackedProduct for weight in self._packed):
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


@dataclass(frozen=True)
class MatrixCodes:
    """A matrix, as arguments of `aerie.kernels.packed.weight.pack`.

    codes: uint8 [rows, columns], one code each.
    scales: [rows, columns / group].
    zeros: same shape as scales, or None.
    row_scale: float32 [rows], or None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    row_scale: Tensor | None = None


class PackedScheme(LinearLayout):
    """Layout and tensors of a packed format.

    code: see `PackedWeight`.
    group: inputs that share a scale; None for a scale per output.
    kinds: the tensors of a matrix, as last components of names.
    unused: tensors that a checkpoint may have, without effect here.
    any_float: tensors that stay in the checkpoint's dtype.
    has_zeros, has_row_scale: whether `MatrixCodes` has them.
    """

    code: Code
    group: int | None
    kinds: tuple[str, ...]
    unused: tuple[str, ...] = ()
    any_float: tuple[str, ...] = ()
    has_zeros: bool = False
    has_row_scale: bool = False

    def __str__(self) -> str:
        """Name for the log, such as "int4 in groups of 128"."""
        return f"{self.code}, a scale per output" if self.group is None else f"{self.code} in groups of {self.group}"

    @property
    def all_kinds(self) -> tuple[str, ...]:
        return (*self.kinds, *self.unused)

    @property
    def optional(self) -> tuple[str, ...]:
        return self.unused

    @abstractmethod
    def storage(self, part: Part) -> dict[str, Tensor]:
        """Allocate this rank's share of a matrix, by kind. A rank has whole groups, see `widened`.

        Raises ValueError if the matrix cannot be stored like this.
        """

    @abstractmethod
    def copy(self, kind: str, part: Part, full: Tensor, out: Tensor) -> None:
        """Copy this rank's share of `full`, the checkpoint's tensor of `kind`, to `out`, which `storage` allocated.

        Raises WrongTensorError for a wrong shape or dtype.
        """

    @abstractmethod
    def read(self, stored: Mapping[str, Tensor]) -> MatrixCodes:
        """Return the matrix, with `widened` columns. stored: the tensors that `copy` filled, by kind. Raises ValueError
        for NaN scales."""

    @abstractmethod
    def dummy(self, stored: Mapping[str, Tensor], fan_in: int, generator: torch.Generator) -> None:
        """Fill the tensors of `storage` with random codes, scaled so that outputs are as large as inputs."""

    def packed_bytes(self, rows: int, columns: int, *experts: int) -> int:
        """Return the bytes of a packed matrix, with 16-bit scales."""
        meta, group = torch.device("meta"), self.group or columns
        weight = empty(
            rows, columns, group, self.code, meta, torch.bfloat16, self.has_zeros, self.has_row_scale, *experts
        )
        return weight.num_bytes

    def stored(self, part: Part) -> StoredMatrix:
        return _StoredPacked(self, part)

    def pack(self, stored: Sequence[StoredMatrix], shape: LinearShape) -> list[PackedPart]:
        matrices = [self.read(part.matrix) for part in stored if isinstance(part, _StoredPacked)]
        if shape.padding:
            matrices[-1] = with_rows(matrices[-1], 0, matrices[-1].codes.shape[0] + shape.padding)
        columns = shape.parts[0].columns
        whole = self.widened(columns)
        return [PackedPart(packed_below(matrices, self), None, (columns.first - whole.first, whole.end - columns.end))]

    def max_inputs(self, columns: Span) -> int:
        return self.widened(columns).size

    def layer_bytes(self, shape: LinearShape, scale_dtype: torch.dtype) -> int:
        return self.packed_bytes(shape.out_features, self.max_inputs(shape.parts[0].columns))

    def widened(self, columns: Span) -> Span:
        """Return `columns` extended to whole groups, because a rank's boundary may split a group. Inputs of the
        additional columns must be zero."""
        if self.group is None:
            return columns
        first, end = columns.first // self.group, -(-columns.end // self.group)
        return Span(first * self.group, end * self.group, columns.total)


class _StoredPacked(StoredMatrix):
    """One low-bit matrix, as stored.

    tensors: tensor of each kind.
    """

    def __init__(self, scheme: PackedScheme, part: Part) -> None:
        super().__init__()
        self._scheme, self._part = scheme, part
        tensors = scheme.storage(part).items()
        self.tensors = nn.ParameterDict({kind: nn.Parameter(tensor, requires_grad=False) for kind, tensor in tensors})

    @property
    def matrix(self) -> dict[str, Tensor]:
        return {kind: tensor.data for kind, tensor in self.tensors.items()}

    def load(self, kind: str, full: Tensor) -> None:
        if kind in self._scheme.kinds:
            self._scheme.copy(kind, self._part, full, self.tensors[kind].data)

    def fill_dummy(self, generator: torch.Generator) -> None:
        self._scheme.dummy(self.matrix, self._part.columns.total, generator)


def with_rows(matrix: MatrixCodes, first: int, num_rows: int) -> MatrixCodes:
    """Return `matrix` at row `first` of `num_rows`; the other rows are zero."""

    def padded(tensor: Tensor | None) -> Tensor | None:
        """Return a tensor with rows of zeros around its own."""
        if tensor is None or tensor.shape[0] == num_rows:
            return tensor
        whole = tensor.new_zeros((num_rows, *tensor.shape[1:]))
        whole[first : first + tensor.shape[0]].copy_(tensor)
        return whole

    codes, scales = padded(matrix.codes), padded(matrix.scales)
    assert codes is not None and scales is not None
    return MatrixCodes(codes, scales, padded(matrix.zeros), padded(matrix.row_scale))


def packed_below(matrices: list[MatrixCodes], scheme: PackedScheme) -> PackedWeight:
    """Pack vertically stacked matrices."""

    def joined(tensors: list[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    codes = torch.cat([matrix.codes for matrix in matrices])
    scales = torch.cat([matrix.scales for matrix in matrices])
    zeros, row_scale = joined([item.zeros for item in matrices]), joined([item.row_scale for item in matrices])
    return pack(codes, scales, zeros, row_scale, scheme.group or codes.shape[1], scheme.code)
