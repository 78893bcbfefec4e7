"""Stacked experts with 4- or 8-bit integer weights.

`aerie.workers.quantization.packed_experts` packs them, unless their inputs are in groups out of order: that order
differs between experts, so each expert would need its own gathered rows."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.packed.weight import Code
from aerie.workers.layers.experts_method import DenseExperts, ExpertsShape
from aerie.workers.layers.linear_method import LinearShape, Part
from aerie.workers.quantization.integers.format import IntFormat
from aerie.workers.quantization.integers.packing import pack_parts
from aerie.workers.quantization.integers.stored import StoredInt, fill_dummy
from aerie.workers.quantization.packed_scheme import MatrixCodes, PackedScheme

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
        return self.layout.kept

    @property
    def any_float(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.layout.scales_kind,)

    @property
    def has_zeros(self) -> bool:  # type: ignore[override]
        return not self.layout.symmetric

    @property
    def unused(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(kind for kind in self.layout.kinds if kind not in self.layout.kept)

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
            self.shape.num_experts * one.out_features * one.in_features * self.dtype.itemsize
            for one in (self.shape.gate_up, self.shape.down)
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

    def _dequantised(self, one: LinearShape) -> Tensor:
        """Dequantise expert by expert, which bounds the scratch memory."""
        device = next(self._of(one.parts[0]).parameters()).device
        dense = torch.empty(self.shape.num_experts, one.out_features, one.in_features, dtype=self.dtype, device=device)
        for expert, out in enumerate(dense):
            stored = [self._of(part).matrix(expert) for part in one.parts]
            packed = pack_parts(stored, one, self.layout)
            out.copy_(torch.cat([part.dense(one.in_features, self.dtype) for part in packed]))
        return dense
