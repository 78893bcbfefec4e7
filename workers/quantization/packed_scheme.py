"""`PackedScheme`: the storage of one low-bit matrix in a checkpoint. A scheme shards and reads the tensors of a matrix;
the methods of layers (`packed_linear`, `packed_experts`) keep them until `finish`, then build a `PackedWeight`."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aerie.kernels.packed.weight import Code, PackedWeight, empty, pack
from aerie.kernels.span import Span
from aerie.workers.layers.linear_method import LinearShape, Part
from aerie.workers.quantization.packed_linear import LinearLayout, PackedPart, StoredMatrix


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
        matrices = [self.read(each.matrix) for each in stored if isinstance(each, _StoredPacked)]
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
    """tensors: tensor of each kind."""

    def __init__(self, scheme: PackedScheme, part: Part) -> None:
        super().__init__()
        self._scheme, self._part = scheme, part
        kept = scheme.storage(part).items()
        self.tensors = nn.ParameterDict({kind: nn.Parameter(tensor, requires_grad=False) for kind, tensor in kept})

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
        given = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(given) if given else None

    codes = torch.cat([matrix.codes for matrix in matrices])
    scales = torch.cat([matrix.scales for matrix in matrices])
    zeros, row_scale = joined([each.zeros for each in matrices]), joined([each.row_scale for each in matrices])
    return pack(codes, scales, zeros, row_scale, scheme.group or codes.shape[1], scheme.code)
