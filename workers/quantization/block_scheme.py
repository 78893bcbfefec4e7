"""Quantised layers of GGUF files (`BlockQuant`), and the block types that they consist of: how the bytes of a block
become codes, scales and offsets, equal bit for bit to ggml's own dequantisation in float32.

    weight[i] = (code[i] - zero) * scale[i / group] + offset[i / group]

Types that can be packed without loss stay packed, others are dequantised when they are read. Formats: ggml's
`block_q4_0` to `block_q6_K`, and OCP Microscaling Formats 1.0 for MXFP4.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.packed.weight import Code
from aerie.workers.layers.experts_method import ExpertsMethod, ExpertsShape
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, Part, UnquantizedLinearMethod
from aerie.workers.layers.weighted import WrongTensorError, check_shape
from aerie.workers.quantization.integers.scheme import ModuleScheme, SchemeQuant
from aerie.workers.quantization.packed_experts import PackedExperts
from aerie.workers.quantization.packed_linear import MatrixCodes, PackedScheme
from aerie.workers.quantization.quant_method import QuantMethod

_MAX_SCRATCH_VALUES = 1 << 24  # values dequantised at once
_E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)  # OCP Microscaling Formats 1.0, table 4; bit 3 is the sign


@dataclass(frozen=True)
class Blocks:
    """Decoded blocks.

    codes: [blocks, values] uint8, or float32 if the type's values are no integers.
    scales: [blocks, groups] float32.
    offsets: [blocks, groups] float32, or None.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF's blocks.

    values, num_bytes: number of values and bytes of a block.
    zero: see the module.
    decode: [blocks, num_bytes] uint8 -> `Blocks`.

    packed: the code in which `aerie.kernels.packed` multiplies this type without loss; None: none. Its groups have 32
        values, symmetric codes and 16-bit scales.
    """

    values: int
    num_bytes: int
    zero: int
    decode: Callable[[Tensor], Blocks]
    packed: Code | None = None

    def row_bytes(self, columns: int) -> int:
        return columns // self.values * self.num_bytes

    def dequantize(self, raw: Tensor) -> Tensor:
        """Return float32 [rows, columns].

        raw: [rows, bytes of a row] uint8.
        """
        rows, blocks = raw.shape[0], raw.shape[1] // self.num_bytes
        out = torch.empty((rows, blocks * self.values), device=raw.device)
        step = max(1, _MAX_SCRATCH_VALUES // max(1, out.shape[1]))
        for first in range(0, rows, step):
            part = raw[first : first + step].reshape(-1, self.num_bytes)
            out[first : first + step] = self._values(self.decode(part)).view(-1, out.shape[1])
        return out

    def _values(self, blocks: Blocks) -> Tensor:
        groups = blocks.scales.shape[1]
        values = blocks.codes.float().view(-1, groups, self.values // groups) - self.zero
        values *= blocks.scales[..., None]
        return values if blocks.offsets is None else values.add_(blocks.offsets[..., None])


def _half(raw: Tensor, first: int) -> Tensor:
    """Return the float16 numbers at byte `first`: [blocks, 1] float32."""
    return raw[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """Return [blocks, 32]: the lower halves of 16 bytes, then the upper halves."""
    return torch.cat((raw & 15, raw >> 4), 1)


def _fifth_bits(raw: Tensor) -> Tensor:
    """Return the bits of 4 bytes as 16: [blocks, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return ((raw[:, :, None] >> shifts & 1) << 4).flatten(1)


def _planes(raw: Tensor, width: int, bits: int) -> Tensor:
    """Return [blocks, values] of `bits` bits: `width` bytes have the lowest bits of `width` values, then the next bits
    of the next values."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw.device)[:, None]
    return (raw.view(raw.shape[0], -1, 1, width) >> shifts & ((1 << bits) - 1)).flatten(1)


def _q4_0(raw: Tensor) -> Blocks:
    return Blocks(_nibbles(raw[:, 2:]), _half(raw, 0))


def _q4_1(raw: Tensor) -> Blocks:
    return Blocks(_nibbles(raw[:, 4:]), _half(raw, 0), _half(raw, 2))


def _q5_0(raw: Tensor) -> Blocks:
    return Blocks((_nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])) + 112, _half(raw, 0))  # 16 becomes 128


def _q5_1(raw: Tensor) -> Blocks:
    return Blocks(_nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8]), _half(raw, 0), _half(raw, 2))


def _q8_0(raw: Tensor) -> Blocks:
    return Blocks(raw[:, 2:] ^ 128, _half(raw, 0))


def _q2_k(raw: Tensor) -> Blocks:
    scales, minima = (raw[:, :16] & 15).float(), (raw[:, :16] >> 4).float()
    return Blocks(_planes(raw[:, 16:80], 32, 2), _half(raw, 80) * scales, -(_half(raw, 82) * minima))


def _q3_k(raw: Tensor) -> Blocks:
    high, low, scales = _planes(raw[:, :32], 32, 1), _planes(raw[:, 32:96], 32, 2), raw[:, 96:108]
    scales = _planes(scales[:, :8], 8, 4) | _planes(scales[:, 8:], 4, 2) << 4
    return Blocks(low | high << 2, _half(raw, 108) * (scales.float() - 32))


def _scales_and_minima(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and 8 minima of 6 bits in 12 bytes."""
    first, second, both = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scales = torch.cat((first & 63, both & 15 | first >> 2 & 48), 1)
    return scales.float(), torch.cat((second & 63, both >> 4 | second >> 2 & 48), 1).float()


def _q4_k(raw: Tensor) -> Blocks:
    scales, minima = _scales_and_minima(raw[:, 4:16])
    return Blocks(_planes(raw[:, 16:], 32, 4), _half(raw, 0) * scales, -(_half(raw, 2) * minima))


def _q5_k(raw: Tensor) -> Blocks:
    scales, minima = _scales_and_minima(raw[:, 4:16])
    codes = _planes(raw[:, 48:], 32, 4) | _planes(raw[:, 16:48], 32, 1) << 4
    return Blocks(codes, _half(raw, 0) * scales, -(_half(raw, 2) * minima))


def _q6_k(raw: Tensor) -> Blocks:
    codes = _planes(raw[:, :128], 64, 4) | _planes(raw[:, 128:192], 32, 2) << 4
    return Blocks(codes, _half(raw, 208) * raw[:, 192:208].contiguous().view(torch.int8).float())


def _mxfp4(raw: Tensor) -> Blocks:
    values = (*_E2M1_TWICE, *(-value for value in _E2M1_TWICE))
    table = torch.tensor(values, dtype=torch.float32, device=raw.device)  # of integers, which have no negative zero
    return Blocks(table[_nibbles(raw[:, 1:]).long()], torch.exp2(raw[:, :1].float() - 128))


BLOCK_TYPES = {  # values, num_bytes, zero, decode, packed
    "Q4_0": BlockType(32, 18, 8, _q4_0, "int4"),
    "Q4_1": BlockType(32, 20, 0, _q4_1),
    "Q5_0": BlockType(32, 22, 128, _q5_0, "int8"),
    "Q5_1": BlockType(32, 24, 0, _q5_1),
    "Q8_0": BlockType(32, 34, 128, _q8_0, "int8"),
    "Q2_K": BlockType(256, 84, 0, _q2_k),
    "Q3_K": BlockType(256, 110, 4, _q3_k),
    "Q4_K": BlockType(256, 144, 0, _q4_k),
    "Q5_K": BlockType(256, 176, 0, _q5_k),
    "Q6_K": BlockType(256, 210, 32, _q6_k),
    "MXFP4": BlockType(32, 17, 0, _mxfp4),
}
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
    """A GGUF checkpoint's quantization: a block type for each module.

    types: the block type of each module, by the checkpoint's names; of experts, the first one's.
    """

    types: Mapping[str, str]

    def declared(self, name: str) -> BlockScheme | None:
        kind = self.types.get(name)
        return None if kind is None or BLOCK_TYPES[kind].packed is None else BlockScheme(kind)

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
