"""Stacked experts whose weights have 4 or 8 bits."""

import torch
from torch import Tensor, nn

from workers.layers.experts import DenseExperts, ExpertsShape
from workers.layers.linear_method import LinearShape, Part
from workers.ops.gemm.workspace import GEMMOptions
from workers.quantization.integers.format import IntFormat
from workers.quantization.integers.packing import pack_parts
from workers.quantization.integers.stored import StoredInt


class IntExperts(DenseExperts):
    """stored: by part; empty after `finish`."""

    def __init__(self, shape: ExpertsShape, layout: IntFormat) -> None:
        super().__init__(shape)
        self.kinds = layout.kinds
        self.layout, self._dtype = layout, torch.get_default_dtype()
        self.stored = nn.ModuleDict({part.name: StoredInt(layout, part, shape.num_experts) for part in shape.parts})
        self._dense: tuple[Tensor, Tensor] | None = None

    @property
    def format(self) -> str:
        return str(self.layout)

    def num_bytes(self, options: GEMMOptions) -> int:
        return sum(
            self.shape.num_experts * one.out_features * one.in_features * self._dtype.itemsize
            for one in (self.shape.gate_up, self.shape.down)
        )

    def dense_weights(self) -> tuple[Tensor, Tensor]:
        assert self._dense is not None, "finish comes first"
        return self._dense

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
            self._dense = self._dequantised(self.shape.gate_up), self._dequantised(self.shape.down)
            self.stored = nn.ModuleDict()
        super().finish(options)

    def _dequantised(self, one: LinearShape) -> Tensor:
        """Dequantise expert by expert, which bounds the scratch memory."""
        device = next(self._of(one.parts[0]).parameters()).device
        dense = torch.empty(self.shape.num_experts, one.out_features, one.in_features, dtype=self._dtype, device=device)
        for expert, out in enumerate(dense):
            stored = [self._of(part).matrix(expert) for part in one.parts]
            packed = pack_parts(stored, one, self.layout)
            out.copy_(torch.cat([part.dense(one.in_features, self._dtype) for part in packed]))
        return dense
