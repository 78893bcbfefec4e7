"""Weights of 4- or 8-bit integers and 16-bit activations (W4A16, W8A16), in any layout of `IntFormat`: `IntScheme`
gives linear layers and stacked experts their methods, `SchemeQuant` is a checkpoint with a scheme per module. Matrices
of one layer may have different schemes, or none. Experts whose groups are out of order are not packed, because each
would need its own gathered rows."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, nn

from aerie.kernels.capability import Capability
from aerie.kernels.cpp_library import compiles
from aerie.kernels.fp8.rows import Fp8Rows
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.packed.weight import Code
from aerie.kernels.span import Span
from aerie.workers.layers.experts_method import DenseExperts, ExpertsMethod, ExpertsShape, UnquantizedExperts
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, Part, UnquantizedLinearMethod
from aerie.workers.quantization.integers.format import IntFormat
from aerie.workers.quantization.integers.packing import StoredInt, fill_dummy, max_inputs, pack_parts, packed_bytes
from aerie.workers.quantization.packed_experts import PackedExperts
from aerie.workers.quantization.packed_linear import (
    LinearLayout,
    MatrixCodes,
    PackedLinear,
    PackedPart,
    PackedScheme,
    StoredMatrix,
)
from aerie.workers.quantization.quant_method import QuantMethod


class SeparateParts(LinearMethod):
    """A linear layer whose parts have different methods.

    methods: one per part of `shape`, each for a shape with that part alone.
    """

    def __init__(self, shape: LinearShape, methods: Sequence[LinearMethod]) -> None:
        super().__init__(shape)
        assert not shape.padding, "a vocabulary head has one part"
        self.methods = nn.ModuleList(methods)
        self.kinds = tuple(dict.fromkeys(kind for method in methods for kind in method.kinds))

    @property
    def format(self) -> str:
        return " and ".join(dict.fromkeys(self._of(part)[0].format for part in self.shape.parts))

    def num_bytes(self, options: GEMMOptions) -> int:
        return sum(self._of(part)[0].num_bytes(options) for part in self.shape.parts)

    def _of(self, part: Part) -> tuple[LinearMethod, Part]:
        method = self.methods[self.shape.parts.index(part)]
        assert isinstance(method, LinearMethod)
        return method, method.shape.parts[0]

    def kinds_of(self, part: Part) -> tuple[str, ...]:
        method, own = self._of(part)
        return method.kinds_of(own)

    @property
    def dtype(self) -> torch.dtype:
        return self._of(self.shape.parts[0])[0].dtype

    def load(self, kind: str, part: Part, full: Tensor) -> None:
        method, own = self._of(part)
        method.load(kind, own, full)

    def fill_missing(self, kind: str, part: Part) -> bool:
        method, own = self._of(part)
        return method.fill_missing(kind, own)

    def fill_dummy(self, generator: torch.Generator) -> None:
        for part in self.shape.parts:
            self._of(part)[0].fill_dummy(generator)

    def finish(self, options: GEMMOptions) -> None:
        for part in self.shape.parts:
            self._of(part)[0].finish(options)

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        products = []
        for part in self.shape.parts:
            own = None if bias is None else bias[part.offset : part.offset + part.rows.size]
            products.append(self._of(part)[0].multiply(x, own))
        return torch.cat(products, 1) if out is None else torch.cat(products, 1, out=out)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IntMatrix(PackedScheme):
    """An expert's matrix in an `IntFormat`."""

    layout: IntFormat

    @property
    def code(self) -> Code:  # type: ignore[override]
        return self.layout.code

    @property
    def group(self) -> int | None:  # type: ignore[override]
        return self.layout.group

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.layout.rank_kinds

    @property
    def any_float(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.layout.scales_kind,)

    @property
    def has_zeros(self) -> bool:  # type: ignore[override]
        return not self.layout.symmetric

    @property
    def unused(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(kind for kind in self.layout.kinds if kind not in self.layout.rank_kinds)

    def _whole_groups(self, part: Part) -> Part:
        return replace(part, columns=self.widened(part.columns))

    def storage(self, part: Part) -> dict[str, Tensor]:
        word = self.layout.word
        if part.columns.total % (self.layout.group or 1):
            raise ValueError(f"{part.name}: {part.columns.total} inputs are not whole groups of {self.layout.group}")
        for what, span in (("rows", part.rows), ("columns", self.widened(part.columns))):
            if span.first % word or span.end % word:
                raise ValueError(
                    f"{part.name}: {what} {span.first} to {span.end} of a rank are no multiple of the {word} integers "
                    "of a word; set another tensor_parallel, or parallel.expert_parallel: true"
                )
        whole = self._whole_groups(part)
        shares = self.layout.tensors(whole).items()
        return {kind: torch.empty(share.shape(whole), dtype=share.dtype) for kind, share in shares}

    def copy(self, kind: str, part: Part, full: Tensor, out: Tensor) -> None:
        """Copy this rank's part of a checkpoint's tensor to `out`. The part is widened to whole groups."""
        whole = self._whole_groups(part)
        out.copy_(self.layout.tensors(whole)[kind].cut(full, whole))

    def read(self, stored: Mapping[str, Tensor]) -> MatrixCodes:
        read = self.layout.read_whole(stored)
        if not self.layout.symmetric:
            return MatrixCodes(read.codes, read.scales, read.zeros)
        if bool((read.zeros != self.layout.symmetric_zero).any()):
            raise ValueError(
                "quantization_config says that weights are symmetric, but zeros of experts are not; download the "
                "checkpoint again, or set sym=false in its config.json"
            )
        return MatrixCodes(read.codes, read.scales)

    def dummy(self, stored: Mapping[str, Tensor], fan_in: int, generator: torch.Generator) -> None:
        for kind, tensor in stored.items():
            fill_dummy(self.layout, kind, tensor, fan_in, generator)


class UnorderedIntExperts(DenseExperts):
    """Experts whose inputs are in groups out of order; they are dequantised to the model's dtype.

    stored: matrices by part; empty after `finish`.
    """

    def __init__(self, shape: ExpertsShape, layout: IntFormat) -> None:
        super().__init__(shape)
        self.kinds = layout.kinds
        self.layout = layout
        self.stored = nn.ModuleDict({part.name: StoredInt(layout, part, shape.num_experts) for part in shape.parts})

    @property
    def format(self) -> str:
        return f"{self.layout}, dequantised"

    def num_bytes(self, options: GEMMOptions) -> int:
        return sum(
            self.shape.num_experts * matrix.out_features * matrix.in_features * self.dtype.itemsize
            for matrix in (self.shape.gate_up, self.shape.down)
        )

    def _of(self, part: Part) -> StoredInt:
        stored = self.stored[part.name]
        assert isinstance(stored, StoredInt)
        return stored

    def load(self, kind: str, expert: int, part: Part, full: Tensor) -> None:
        self._of(part).load(kind, full, expert)

    def fill_missing(self, kind: str) -> bool:
        return kind in self.layout.optional

    def fill_dummy(self, generator: torch.Generator) -> None:
        for part in self.shape.parts:
            self._of(part).fill_dummy(generator)

    def finish(self, options: GEMMOptions) -> None:
        if self._dense is None:
            if options.packed:
                logger.warning("experts [%d, %d] are dequantised: desc_act", self.shape.size, self.shape.width)
            self._dense = self._dequantised(self.shape.gate_up), self._dequantised(self.shape.down)
            self.stored = nn.ModuleDict()
        super().finish(options)

    def _dequantised(self, matrix: LinearShape) -> Tensor:
        """Dequantise expert by expert, which bounds the scratch memory."""
        device = next(self._of(matrix.parts[0]).parameters()).device
        dense = torch.empty(
            self.shape.num_experts, matrix.out_features, matrix.in_features, dtype=self.dtype, device=device
        )
        for expert, out in enumerate(dense):
            stored = [self._of(part).matrix(expert) for part in matrix.parts]
            packed = pack_parts(stored, matrix, self.layout)
            out.copy_(torch.cat([part.dense(matrix.in_features, self.dtype) for part in packed]))
        return dense


class ModuleScheme(LinearLayout):
    """The storage of one module's weight. Equal for modules that can be merged into one product."""

    @abstractmethod
    def experts_method(self, shape: ExpertsShape) -> ExpertsMethod:
        """See `QuantMethod.experts_method`."""


@dataclass(frozen=True)
class IntScheme(IntFormat, ModuleScheme):
    """Integers of 4 or 8 bits."""

    @property
    def all_kinds(self) -> tuple[str, ...]:
        return self.kinds

    def experts_method(self, shape: ExpertsShape) -> ExpertsMethod:
        return UnorderedIntExperts(shape, self) if self.ordered else PackedExperts(shape, IntMatrix(self))

    def stored(self, part: Part) -> StoredMatrix:
        return StoredInt(self, part)

    def pack(self, stored: Sequence[StoredMatrix], shape: LinearShape) -> list[PackedPart]:
        return pack_parts([part.matrix() for part in stored if isinstance(part, StoredInt)], shape, self)

    def max_inputs(self, columns: Span) -> int:
        return max_inputs(columns, self)

    def layer_bytes(self, shape: LinearShape, scale_dtype: torch.dtype) -> int:
        return packed_bytes(shape, self, scale_dtype)


@dataclass(frozen=True)
class SchemeQuant(QuantMethod):
    """A checkpoint with a scheme per module, chosen by its name.

    source: names the checkpoint in errors.
    stored_plain: modules that have a 16-bit weight in the files, regardless of quantization_config; see `fitted`.
    """

    source: str
    stored_plain: frozenset[str] = field(default=frozenset(), kw_only=True)

    def fallback(self, device: torch.device) -> str | None:
        if Capability.of(device).runs_kernels or compiles(Capability.of(device)):
            return None
        return "weights of few bits are multiplied in the model's type (this device has no product of them)"

    @abstractmethod
    def declared(self, name: str) -> ModuleScheme | None:
        """Return the scheme that quantization_config declares for a module; None: it is not quantised."""

    def scheme_of(self, name: str) -> ModuleScheme | None:
        return None if name in self.stored_plain else self.declared(name)

    def fitted(self, with_weight: Callable[[], frozenset[str]]) -> Self:
        """Return the method for the files: a module that has a plain `weight` there is unquantised if the declared
        scheme has no tensor of that name, because published lists of modules may be incomplete."""

        def is_plain(name: str) -> bool:
            scheme = self.declared(name)
            return scheme is not None and "weight" not in scheme.all_kinds

        return replace(self, stored_plain=frozenset(filter(is_plain, with_weight())))

    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        schemes = [self.scheme_of(name) for name in names]
        if len(set(schemes)) == 1:
            return self.method_of(names, schemes[0], shape)
        return SeparateParts(
            shape,
            [
                self.method_of([name], scheme, LinearShape((replace(part, offset=0),)))
                for name, scheme, part in zip(names, schemes, shape.parts, strict=True)
            ],
        )

    def method_of(self, names: Sequence[str], scheme: ModuleScheme | None, shape: LinearShape) -> LinearMethod:
        """Return the method of a layer whose modules `names` all have the same scheme."""
        return UnquantizedLinearMethod(shape) if scheme is None else PackedLinear(shape, scheme)

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        schemes = {name: self.scheme_of(name) for name in names}
        if len(set(schemes.values())) > 1:
            listed = ", ".join(f"{name} {scheme or 'unquantised'}" for name, scheme in schemes.items())
            raise ValueError(
                f"{self.source}: quantization_config: the matrices of an expert are quantised differently ({listed}), "
                "which is not supported; use a checkpoint that quantises all of them alike"
            )
        scheme = next(iter(schemes.values()))
        return UnquantizedExperts(shape) if scheme is None else scheme.experts_method(shape)
