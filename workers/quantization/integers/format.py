"""Checkpoint formats of 4- and 8-bit integers: a module's tensors, a rank's share of them, and their decoding. Pure
functions of tensors; the layers are `aerie.workers.quantization.packed_linear` and `packed_experts`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from aerie.kernels.packed.weight import SYMMETRIC_ZERO, Code
from aerie.kernels.span import Span
from aerie.workers.layers.linear_method import Part
from aerie.workers.layers.weighted import WrongTensorError, check_plain, check_shape

# Word w of AutoAWQ's GEMM layout has column 8 w + _AWQ_ORDER[i] in its bits 4 i to 4 i + 3.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_OUTPUTS_LAST = ("qweight", "qzeros", "scales")  # kinds whose last dimension is outputs
_INPUT_KINDS = ("g_idx", "weight_g_idx")
Layout = Literal["pack-quantized", "int-quantized", "awq", "gptq"]


@dataclass(frozen=True)
class Axis:
    """The dimension of a stored tensor for outputs, or for inputs.

    per: outputs or inputs per element.
    whole: whether every rank keeps all of it.
    """

    dim: int
    per: int
    whole: bool = False

    def size(self, total: int) -> int:
        return -(-total // self.per)

    def span(self, share: Span) -> Span:
        """Return the elements that contain a rank's share; the first and the last may contain more."""
        size = self.size(share.total)
        if self.whole:
            return Span.whole(size)
        return Span(share.first // self.per, -(-share.end // self.per), size)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a module. dtype: None for any floating-point dtype."""

    dtype: torch.dtype | None
    outputs: Axis | None
    inputs: Axis | None

    def shape(self, part: Part) -> tuple[int, ...]:
        """Return the shape of this rank's share."""
        return tuple(span.size for span in self._spans(part))

    def cut(self, full: Tensor, part: Part) -> Tensor:
        """Return this rank's share. Raises WrongTensorError for a wrong shape or dtype."""
        if self.dtype is None:
            check_plain(full)
        elif full.dtype != self.dtype:
            raise WrongTensorError(
                f"is {full.dtype}, not {self.dtype}, which config.json's quantization_config implies"
            )
        spans = self._spans(part)
        check_shape(full, [span.total for span in spans])
        return full[tuple(slice(span.first, span.end) for span in spans)]

    def _spans(self, part: Part) -> list[Span]:
        axes = ((self.outputs, part.rows), (self.inputs, part.columns))
        return [axis.span(share) for axis, share in sorted(_present(axes), key=lambda pair: pair[0].dim)]


def _present(axes: Sequence[tuple[Axis | None, Span]]) -> list[tuple[Axis, Span]]:
    return [(axis, share) for axis, share in axes if axis is not None]


@dataclass(frozen=True)
class Codes:
    """The decoded tensors of a part on this rank: weight = (code - zero) * scale."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor


@dataclass(frozen=True)
class IntFormat:
    """How a checkpoint stores integer weights.

    layout: layout of the tensors.
    bits: 4 or 8; int-quantized: 8.
    group: number of inputs that share a scale; None: all inputs of an output.
    symmetric: whether zeros are 8 or 128; compressed-tensors then stores none.
    ordered: whether a tensor of indices has the group of each input.
    zeros_less_one: whether stored zeros are one too small, as in the first version of GPTQ's layout.
    """

    layout: Layout
    bits: int
    group: int | None
    symmetric: bool
    ordered: bool = False
    zeros_less_one: bool = False

    KINDS: ClassVar[dict[Layout, tuple[str, str, str, str]]] = {  # codes, scales, zeros, groups of inputs
        "pack-quantized": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
        "int-quantized": ("weight", "weight_scale", "", ""),  # signed bytes, not packed
        "awq": ("qweight", "scales", "qzeros", ""),
        "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    }
    SHAPE: ClassVar[str] = "weight_shape"  # compressed-tensors' int64 [2], redundant with config.json

    def __str__(self) -> str:
        groups = ", a scale per output" if self.group is None else f" in groups of {self.group}"
        return f"{self.code}{groups}" + (", of any inputs" if self.ordered else "")

    @property
    def code(self) -> Code:
        return "int4" if self.bits == 4 else "int8"

    @property
    def word(self) -> int:
        """Codes per element of the stored tensor."""
        return 1 if self.layout == "int-quantized" else 32 // self.bits

    @property
    def symmetric_zero(self) -> int:
        return SYMMETRIC_ZERO[self.code]

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        codes, scales, zeros, order = self.KINDS[self.layout]
        if self.layout == "int-quantized":
            return codes, scales
        if self.layout == "awq":
            return codes, scales, zeros
        if self.layout == "gptq":
            return codes, scales, zeros, order
        optional = ((zeros, not self.symmetric), (order, self.ordered))
        return codes, scales, self.SHAPE, *(kind for kind, is_there in optional if is_there)

    @cached_property
    def rank_kinds(self) -> tuple[str, ...]:
        """Tensors that a rank keeps until they are packed."""
        return tuple(kind for kind in self.kinds if kind not in self.optional)

    @property
    def optional(self) -> tuple[str, ...]:
        """Tensors that are checked but not kept, because they are redundant; some exporters omit them."""
        return (self.SHAPE, *(() if self.ordered else (self.KINDS[self.layout][3],)))

    @property
    def scales_kind(self) -> str:
        return self.KINDS[self.layout][1]

    @property
    def zeros_kind(self) -> str:
        return self.KINDS[self.layout][2]

    def tensors(self, part: Part) -> dict[str, StoredTensor]:
        """Return the tensors that a rank keeps until it packs them, by kind."""
        codes, scales, zeros, order = self.KINDS[self.layout]
        word, group = self.word, self.group or part.columns.total
        if self.layout == "int-quantized":
            tensors = {
                codes: StoredTensor(torch.int8, Axis(0, 1), Axis(1, 1)),
                scales: StoredTensor(None, Axis(0, 1), Axis(1, group)),
            }
        elif self.layout == "pack-quantized":
            tensors = {
                codes: StoredTensor(torch.int32, Axis(0, 1), Axis(1, word)),
                scales: StoredTensor(None, Axis(0, 1), Axis(1, group, self.ordered)),
                zeros: StoredTensor(torch.int32, Axis(0, word), Axis(1, group, self.ordered)),
            }
        else:
            along_outputs = self.layout == "awq"
            tensors = {
                codes: StoredTensor(
                    torch.int32, Axis(1, word if along_outputs else 1), Axis(0, 1 if along_outputs else word)
                ),
                scales: StoredTensor(None, Axis(1, 1), Axis(0, group, self.ordered)),
                zeros: StoredTensor(torch.int32, Axis(1, word), Axis(0, group, self.ordered)),
            }
        if self.ordered:
            tensors[order] = StoredTensor(torch.int32, None, Axis(0, 1))
        return {kind: tensor for kind, tensor in tensors.items() if kind in self.rank_kinds}

    def check_values(self, kind: str, full: Tensor, part: Part) -> None:
        """Raise WrongTensorError if a tensor of indices or of sizes does not fit: each input must have a group, and
        groups must ascend if the format is not `ordered`. Reads values."""
        if kind == self.SHAPE:
            implied = [part.rows.total, part.columns.total]
            if full.tolist() != implied:
                raise WrongTensorError(f"is {full.tolist()}, config.json implies {implied}")
            return
        check_shape(full, (part.columns.total,))
        group, total = self.group or part.columns.total, part.columns.total
        last = -(-total // group) - 1
        if bool(((full < 0) | (full > last)).any()):
            raise WrongTensorError(f"has groups of inputs beyond 0 to {last}")
        if not self.ordered and not torch.equal(full.long(), torch.arange(total) // group):
            raise WrongTensorError(
                "puts inputs into groups out of order, which quantization_config's desc_act=false denies"
            )

    def symmetric_word(self) -> int:
        """Return the int32 word of stored zeros of a symmetric weight."""
        value = self.symmetric_zero - self.zeros_less_one
        word = sum(value << shift for shift in range(0, 32, self.bits))
        return word - (1 << 32) if word >= 1 << 31 else word

    def read_whole(self, stored: Mapping[str, Tensor]) -> Codes:
        """Do `read` for a share of whole words and groups."""
        codes, scales = stored[self.KINDS[self.layout][0]], stored[self.scales_kind]
        if self.layout in ("pack-quantized", "int-quantized"):
            rows, columns = scales.shape[0], codes.shape[1] * self.word
        else:
            rows, columns = scales.shape[1], codes.shape[0] * (1 if self.layout == "awq" else self.word)
        return self.read(stored, Part("", Span.whole(rows), Span.whole(columns), 0))

    def read(self, stored: Mapping[str, Tensor], part: Part) -> Codes:
        """Decode this rank's tensors of a part. stored: tensors by kind, in the shapes of `tensors`."""
        tensors = self.tensors(part)
        codes_kind, scales_kind, zeros_kind, order = self.KINDS[self.layout]
        codes = self._values(stored[codes_kind], tensors[codes_kind], part)
        scales = _by_output(stored[scales_kind], tensors[scales_kind])
        if zeros_kind in stored:
            zeros = self._values(stored[zeros_kind], tensors[zeros_kind], part)
            if self.zeros_less_one:  # wraps around, because a zero of 0 is stored as 15
                zeros = (zeros + 1) & ((1 << self.bits) - 1)
        else:
            zeros = torch.full(scales.shape, self.symmetric_zero, dtype=torch.uint8, device=scales.device)
        if self.ordered:
            groups = stored[order].long()
        else:
            group, first = self.group or part.columns.total, part.columns.first
            groups = torch.arange(first, part.columns.end, device=codes.device) // group - first // group
        return Codes(codes, scales, zeros, groups)

    def _values(self, words: Tensor, stored: StoredTensor, part: Part) -> Tensor:
        """Return [rows, columns or groups] uint8, from words that pack several outputs or several inputs."""
        if self.layout == "int-quantized":
            return words.view(torch.uint8) ^ self.symmetric_zero  # from -128 to 127 to codes
        assert stored.outputs is not None and stored.inputs is not None
        along, share = (stored.outputs, part.rows) if stored.outputs.per > 1 else (stored.inputs, part.columns)
        words = words.transpose(0, 1) if along.dim == 0 else words
        first = share.first % along.per
        values = unpacked(words, self.bits, self.layout == "awq")[:, first : first + share.size]
        return values if along is stored.inputs else values.transpose(0, 1)


def _by_output(tensor: Tensor, stored: StoredTensor) -> Tensor:
    assert stored.outputs is not None
    return tensor if stored.outputs.dim == 0 else tensor.transpose(0, 1)


def unpacked(words: Tensor, bits: int, awq: bool = False) -> Tensor:
    """Return the values of words, the lowest bits first: [n, m * 32 / bits] uint8.

    words: [n, m] int32.
    awq: whether words have the order of AutoAWQ's GEMM layout.
    """
    words = words.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps strides of dimensions of size 1
    values = words.view(torch.uint8)  # assumes a little-endian machine, like all with PyTorch's CUDA
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
    if awq and bits == 4:
        order = torch.tensor([_AWQ_ORDER.index(i) for i in range(8)], device=words.device)
        values = values.view(len(values), -1, 8).index_select(2, order).flatten(1)
    return values


def split_outputs(
    full: Tensor, kind: str, rows: Sequence[int], split: Callable[[Tensor], list[Tensor]]
) -> list[Tensor]:
    """Return the tensors of the matrices that are stacked in a checkpoint's matrix.

    full: the matrix's tensor of `kind`, in any format.
    rows: outputs of each matrix.
    split: splits a tensor whose first dimension is outputs, or groups of outputs.
    """
    if full.numel() == 1:  # a scale of the whole matrix
        return [full] * len(rows)
    if kind in _OUTPUTS_LAST:
        return [part.transpose(0, 1) for part in split(full.transpose(0, 1))] if full.dim() == 2 else split(full)
    if kind in _INPUT_KINDS:
        return [full] * len(rows)
    if kind == IntFormat.SHAPE:
        if full.tolist()[:1] != [sum(rows)]:
            raise WrongTensorError(f"is {full.tolist()}, config.json implies {sum(rows)} rows")
        return [torch.tensor([count, *full.tolist()[1:]]) for count in rows]
    return split(full)
