"""`BlockQuant`: the quantised layers of a GGUF file. Types that are packed without loss stay packed, and others are
dequantised when they are read (`block_types`). `aerie.workers.models.gguf.folder` writes the quantization_config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.packed.weight import Code
from aerie.workers.layers.experts_method import ExpertsMethod, ExpertsShape
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, Part, UnquantizedLinearMethod
from aerie.workers.layers.weighted import WrongTensorError, check_shape
from aerie.workers.quantization.block_types import BLOCK_TYPES, BlockType
from aerie.workers.quantization.integers.scheme import ModuleScheme, SchemeQuant
from aerie.workers.quantization.packed_experts import PackedExperts
from aerie.workers.quantization.packed_scheme import MatrixCodes, PackedScheme
from aerie.workers.quantization.quant_method import QuantMethod

METHOD = "gguf"  # quantization_config.quant_method
_CODE_DEVIATION = {"int4": 4.61, "int8": 73.9}  # standard deviation of uniformly distributed codes
_SCALE_BYTES = 2  # at the start of a block


@dataclass(frozen=True)
class BlockScheme(PackedScheme, ModuleScheme):
    """One matrix as rows of blocks: a tensor `weight` [rows, bytes of a row] uint8. name: type of its blocks."""

    name: str

    kinds = ("weight",)
    group = 32

    def __str__(self) -> str:
        return self.name

    @property
    def type(self) -> BlockType:
        return BLOCK_TYPES[self.name]

    @property
    def code(self) -> Code:  # type: ignore[override]
        assert self.type.packed is not None, "only types with packed codes have a scheme"
        return self.type.packed

    def experts_method(self, shape: ExpertsShape) -> ExpertsMethod:
        return PackedExperts(shape, self)

    def storage(self, part: Part) -> dict[str, Tensor]:
        if part.columns.total % self.type.values:
            raise ValueError(f"{part.name}: {part.columns.total} inputs are not whole blocks of {self.type.values}")
        row_bytes = self.type.row_bytes(self.widened(part.columns).size)
        return {"weight": torch.empty(part.rows.size, row_bytes, dtype=torch.uint8)}

    def copy(self, kind: str, part: Part, full: Tensor, out: Tensor) -> None:
        if full.dtype != torch.uint8:
            raise WrongTensorError(f"is {full.dtype}, not blocks of {self.name}")
        check_shape(full, (part.rows.total, self.type.row_bytes(part.columns.total)))
        columns = self.widened(part.columns)
        first, end = self.type.row_bytes(columns.first), self.type.row_bytes(columns.end)
        out.copy_(full[part.rows.first : part.rows.end, first:end])

    def read(self, stored: Mapping[str, Tensor]) -> MatrixCodes:
        raw = stored["weight"]
        blocks = self.type.decode(raw.view(-1, self.type.num_bytes))
        scales = blocks.scales.to(torch.float16).view(raw.shape[0], -1)  # exact: blocks store float16
        if not bool(torch.isfinite(scales).all()):
            raise ValueError(f"blocks of {self.name} have scales that are NaN or infinite; download the file again")
        return MatrixCodes(blocks.codes.view(raw.shape[0], -1), scales)

    def dummy(self, stored: Mapping[str, Tensor], fan_in: int, generator: torch.Generator) -> None:
        raw = stored["weight"].random_(0, 256, generator=generator).view(-1, self.type.num_bytes)
        scale = torch.tensor([fan_in**-0.5 / _CODE_DEVIATION[self.code]], dtype=torch.float16, device=raw.device)
        raw[:, :_SCALE_BYTES] = scale.view(torch.uint8)


@dataclass(frozen=True)
class BlockQuant(SchemeQuant):
    """types: the block type of each module, by the checkpoint's names; of experts, the first one's."""

    types: Mapping[str, str]

    def declared(self, name: str) -> BlockScheme | None:
        found = self.types.get(name)
        return None if found is None or BLOCK_TYPES[found].packed is None else BlockScheme(found)

    def method_of(self, names: Sequence[str], scheme: ModuleScheme | None, shape: LinearShape) -> LinearMethod:
        if scheme is not None:
            return super().method_of(names, scheme, shape)
        return Dequantised(shape, tuple(dict.fromkeys(self.types[name] for name in names if name in self.types)))


class Dequantised(UnquantizedLinearMethod):
    """A weight that was dequantised when it was read. types: of its blocks, for the log."""

    def __init__(self, shape: LinearShape, types: Sequence[str]) -> None:
        super().__init__(shape)
        self._types = types

    @property
    def format(self) -> str:
        return f"{' and '.join(self._types)}, dequantised" if self._types else super().format


def read_blocks(quantization: Mapping[str, Any], source: str) -> QuantMethod:
    """Read `quant_method: gguf`. See `aerie.workers.quantization.table.QuantReader`."""
    if not isinstance(quantization.get("types"), Mapping):
        raise ValueError(
            f"{source}: quantization_config.quant_method='gguf' without the types of its weights; serve the .gguf "
            "file, not this folder"
        )
    types = {name: kind for kind, names in quantization["types"].items() for name in names}
    return BlockQuant(source, types)
