"""`IntScheme`: weights of 4- or 8-bit integers and 16-bit activations (W4A16, W8A16), in any layout of `IntFormat`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.layers.experts_method import ExpertsMethod, ExpertsShape
from workers.layers.linear_method import LinearMethod, LinearShape, Part
from workers.quantization.integers.experts import IntMatrix, UnorderedIntExperts
from workers.quantization.integers.format import IntFormat
from workers.quantization.integers.packing import max_inputs, pack_parts, packed_bytes
from workers.quantization.integers.stored import StoredInt
from workers.quantization.packed_experts import PackedExperts
from workers.quantization.packed_linear import LinearLayout, PackedLinear, PackedPart, StoredMatrix
from workers.quantization.scheme import Scheme
from workers.span import Span


@dataclass(frozen=True)
class IntScheme(Scheme, LinearLayout):
    layout: IntFormat

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.layout.kinds

    def linear_method(self, shape: LinearShape) -> LinearMethod:
        return PackedLinear(shape, self)

    def experts_method(self, shape: ExpertsShape) -> ExpertsMethod:
        if self.layout.ordered:
            return UnorderedIntExperts(shape, self.layout)
        return PackedExperts(shape, IntMatrix(self.layout))

    def __str__(self) -> str:
        return str(self.layout)

    @property
    def all_kinds(self) -> tuple[str, ...]:
        return self.layout.kinds

    @property
    def optional(self) -> tuple[str, ...]:
        return self.layout.optional

    def stored(self, part: Part) -> StoredMatrix:
        return StoredInt(self.layout, part)

    def pack(self, stored: Sequence[StoredMatrix], shape: LinearShape) -> list[PackedPart]:
        return pack_parts([each.matrix() for each in stored if isinstance(each, StoredInt)], shape, self.layout)

    def max_inputs(self, columns: Span) -> int:
        return max_inputs(columns, self.layout)

    def layer_bytes(self, shape: LinearShape, scale_dtype: torch.dtype) -> int:
        return packed_bytes(shape, self.layout, scale_dtype)
