"""`IntScheme`: weights of 4- or 8-bit integers and 16-bit activations (W4A16, W8A16), in any of the layouts that
`IntFormat` reads."""

from dataclasses import dataclass

from workers.layers.experts import ExpertsMethod, ExpertsShape
from workers.layers.linear_method import LinearMethod, LinearShape
from workers.quantization.integers.experts import IntMatrix, UnorderedIntExperts
from workers.quantization.integers.format import IntFormat
from workers.quantization.integers.linear import IntLinear
from workers.quantization.packed_experts import PackedExperts
from workers.quantization.scheme import Scheme


@dataclass(frozen=True)
class IntScheme(Scheme):
    layout: IntFormat

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.layout.kinds

    def linear_method(self, shape: LinearShape) -> LinearMethod:
        return IntLinear(shape, self.layout)

    def experts_method(self, shape: ExpertsShape) -> ExpertsMethod:
        if self.layout.ordered:
            return UnorderedIntExperts(shape, self.layout)
        return PackedExperts(shape, IntMatrix(self.layout))

    def __str__(self) -> str:
        return str(self.layout)
