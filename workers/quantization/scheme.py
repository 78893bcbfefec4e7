"""`Scheme`: the storage of one module's weight. `SchemeQuant`: a checkpoint with a scheme per module."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from attention.capability import Capability
from workers.layers.experts_method import ExpertsMethod, ExpertsShape, UnquantizedExperts
from workers.layers.linear_method import LinearMethod, LinearShape, UnquantizedLinearMethod
from workers.quantization.quant_method import QuantMethod
from workers.quantization.separate_parts import SeparateParts


class Scheme(ABC):
    """A plain value, equal for modules that can be merged into one product."""

    @property
    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """The checkpoint's tensors of a module, as the last components of names."""

    @abstractmethod
    def linear_method(self, shape: LinearShape) -> LinearMethod:
        """See `QuantMethod.linear_method`."""

    @abstractmethod
    def experts_method(self, shape: ExpertsShape) -> ExpertsMethod:
        """See `QuantMethod.experts_method`."""

    @abstractmethod
    def __str__(self) -> str:
        """Name for the log, such as "int4 in groups of 128"."""


@dataclass(frozen=True)
class SchemeQuant(QuantMethod):
    """Chooses a scheme by a module's name.

    source: names the checkpoint in errors.
    stored_plain: modules that have a 16-bit weight in the files, regardless of quantization_config; see `fitted`.
    """

    source: str
    stored_plain: frozenset[str] = field(default=frozenset(), kw_only=True)

    def fallback(self, device: torch.device) -> str | None:
        if Capability.of(device).runs_kernels:
            return None
        return "weights of few bits are multiplied in the model's type (this device has no product of them)"

    @abstractmethod
    def declared(self, name: str) -> Scheme | None:
        """Return the scheme that quantization_config declares for a module; None: it is not quantised."""

    def scheme_of(self, name: str) -> Scheme | None:
        return None if name in self.stored_plain else self.declared(name)

    def fitted(self, with_weight: Callable[[], frozenset[str]]) -> Self:
        """Return the method for the files: a module that has a plain `weight` there is unquantised if the declared
        scheme has no tensor of that name, because published lists of modules may be incomplete."""

        def is_plain(name: str) -> bool:
            scheme = self.declared(name)
            return scheme is not None and "weight" not in scheme.kinds

        return replace(self, stored_plain=frozenset(filter(is_plain, with_weight())))

    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        schemes = [self.scheme_of(name) for name in names]
        if len(set(schemes)) == 1:
            return _method(schemes[0], shape)
        return SeparateParts(
            shape,
            [
                _method(scheme, LinearShape((replace(part, offset=0),)))
                for scheme, part in zip(schemes, shape.parts, strict=True)
            ],
        )

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


def _method(scheme: Scheme | None, shape: LinearShape) -> LinearMethod:
    return UnquantizedLinearMethod(shape) if scheme is None else scheme.linear_method(shape)
