"""`IntScheme`: weights of 4- or 8-bit integers and 16-bit activations (W4A16, W8A16), in any layout of `IntFormat`.
`SchemeQuant`: a checkpoint with a scheme per module."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from aerie.kernels.capability import Capability
from aerie.kernels.cpp_library import compiles
from aerie.kernels.span import Span
from aerie.workers.layers.experts_method import ExpertsMethod, ExpertsShape, UnquantizedExperts
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, Part, UnquantizedLinearMethod
from aerie.workers.quantization.integers.experts import IntMatrix, UnorderedIntExperts
from aerie.workers.quantization.integers.format import IntFormat
from aerie.workers.quantization.integers.packing import max_inputs, pack_parts, packed_bytes
from aerie.workers.quantization.integers.stored import StoredInt
from aerie.workers.quantization.packed_experts import PackedExperts
from aerie.workers.quantization.packed_linear import LinearLayout, PackedLinear, PackedPart, StoredMatrix
from aerie.workers.quantization.quant_method import QuantMethod
from aerie.workers.quantization.separate_parts import SeparateParts


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
        return pack_parts([each.matrix() for each in stored if isinstance(each, StoredInt)], shape, self)

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
            told = ", ".join(f"{name} {scheme or 'unquantised'}" for name, scheme in schemes.items())
            raise ValueError(
                f"{self.source}: quantization_config: the matrices of an expert are quantised differently ({told}), "
                "which is not supported; use a checkpoint that quantises all of them alike"
            )
        scheme = next(iter(schemes.values()))
        return UnquantizedExperts(shape) if scheme is None else scheme.experts_method(shape)
