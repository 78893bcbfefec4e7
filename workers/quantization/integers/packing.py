"""Packs stacked matrices of layers and experts for `aerie.kernels.packed`, from the checkpoint's tensors, which a rank
keeps until then. Each scale must belong to a whole block of inputs, but groups may have arbitrary inputs (GPTQ's
desc_act, compressed-tensors' g_idx) and a shard may split a group. So inputs are sorted by group, and each group is
padded to whole blocks with inputs of weight zero."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aerie.kernels.packed.weight import empty, pack
from aerie.kernels.span import Span
from aerie.workers.layers.linear_method import LinearShape, Part
from aerie.workers.quantization.integers.format import Codes, IntFormat
from aerie.workers.quantization.packed_linear import PackedPart, StoredMatrix

_STEP = 32  # blocks are multiples of it: `aerie.kernels.packed.weight.pack`


@dataclass(frozen=True)
class InputOrder:
    """The order of a matrix's inputs that makes its groups adjacent (`desc_act`).

    block: inputs that share a scale.
    group_of_block: [blocks] int64 group of each block.
    gather: [blocks * block] int64 input of each position, 0 for padding; None: the order is unchanged.
    is_padding: [blocks * block] bool; None without padding.
    """

    block: int
    group_of_block: Tensor
    gather: Tensor | None = None
    is_padding: Tensor | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InputOrder) or self.block != other.block:
            return False
        if not torch.equal(self.group_of_block, other.group_of_block):
            return False
        if self.gather is None or other.gather is None:
            return self.gather is other.gather
        return torch.equal(self.gather, other.gather)

    def to(self, device: torch.device) -> "InputOrder":
        gather = None if self.gather is None else self.gather.to(device)
        padding = None if self.is_padding is None else self.is_padding.to(device)
        return InputOrder(self.block, self.group_of_block.to(device), gather, padding)


def input_order(groups: Tensor) -> InputOrder:
    """Return the order of inputs with these groups, on the CPU. groups: [inputs] int64, on any device."""
    groups = groups.cpu()
    runs, lengths = torch.unique_consecutive(groups, return_counts=True)
    if len(runs) == 1:
        return InputOrder(len(groups), runs)
    block = _common_divisor(lengths)
    if block % _STEP == 0:
        return InputOrder(block, runs.repeat_interleave(lengths // block))
    order = groups.argsort(stable=True)
    present, counts = groups.unique(return_counts=True)  # type: ignore[no-untyped-call]
    block = _common_divisor(counts)
    if block % _STEP:
        block = _STEP
    blocks = (counts + block - 1) // block
    gather = torch.zeros(int(blocks.sum()) * block, dtype=torch.int64)
    is_padding = torch.ones(len(gather), dtype=torch.bool)
    starts = (blocks.cumsum(0) - blocks) * block
    within = torch.arange(len(groups)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    places = starts.repeat_interleave(counts) + within
    gather[places], is_padding[places] = order, False
    return InputOrder(block, present.repeat_interleave(blocks), gather, is_padding if bool(is_padding.any()) else None)


def _common_divisor(lengths: Tensor) -> int:
    divisor = 0
    for length in set(lengths.tolist()):
        divisor = math.gcd(divisor, length)
    return divisor


def pack_parts(stored: Sequence[dict[str, Tensor]], shape: LinearShape, layout: IntFormat) -> list[PackedPart]:
    """Return the packed rows of a layer, in one part unless the order of inputs differs between matrices.

    stored: per part of `shape`, its tensors by kind (`IntFormat.tensors`).
    """
    read = [layout.read(tensors, part) for tensors, part in zip(stored, shape.parts, strict=True)]
    orders = [input_order(codes.groups) for codes in read]
    if shape.padding:
        assert len(read) == 1, "a vocabulary head has one part"
        read = [_padded(read[0], shape.padding)]
    if any(order != orders[0] for order in orders):
        return [_packed([codes], order, layout) for codes, order in zip(read, orders, strict=True)]
    return [_packed(read, orders[0], layout)]


def _packed(parts: list[Codes], order: InputOrder, layout: IntFormat) -> PackedPart:
    """Pack parts with one input order: sort their columns by group, join them, and drop zero points that are all
    symmetric."""
    device = parts[0].codes.device
    order = order.to(device)
    sorted_parts = [_sorted(codes, order) for codes in parts]
    codes, scales, zeros = (
        torch.cat([getattr(part, name) for part in sorted_parts]).contiguous() for name in ("codes", "scales", "zeros")
    )
    is_symmetric = bool((zeros == layout.symmetric_zero).all())  # a device sync, once per loaded layer
    weight = pack(codes, scales, None if is_symmetric else zeros, None, order.block, layout.code)
    return PackedPart(weight, None if order.gather is None else order.gather.int())


def _sorted(codes: Codes, order: InputOrder) -> Codes:
    """Return codes in `order`, with scales and zeros per block."""
    scales, zeros = (tensor.index_select(1, order.group_of_block) for tensor in (codes.scales, codes.zeros))
    if order.gather is None:
        return replace(codes, scales=scales, zeros=zeros)
    values = codes.codes.index_select(1, order.gather)
    if order.is_padding is not None:  # a weight of zero
        values = torch.where(order.is_padding, zeros.repeat_interleave(order.block, 1), values)
    return replace(codes, codes=values, scales=scales, zeros=zeros)


def _padded(codes: Codes, rows: int) -> Codes:
    """Return codes with further rows, of scale zero."""
    values, scales, zeros = (F.pad(tensor, (0, 0, 0, rows)) for tensor in (codes.codes, codes.scales, codes.zeros))
    return replace(codes, codes=values, scales=scales, zeros=zeros)


def max_inputs(columns: Span, layout: IntFormat) -> int:
    """Return the maximum number of inputs of a packed weight, including the padding of its groups."""
    group = layout.group or columns.total
    if layout.ordered:
        return columns.size + 31 * -(-columns.total // group)
    order = input_order(torch.arange(columns.first, columns.end) // group)
    return order.block * len(order.group_of_block)


def packed_bytes(shape: LinearShape, layout: IntFormat, scale_dtype: torch.dtype) -> int:
    """Return the bytes of a packed layer, before its order of inputs is known."""
    columns = shape.parts[0].columns
    group = layout.group or columns.total
    size = columns.size
    if layout.ordered and columns.size < columns.total:  # every group padded by half a block on average
        block = 32
        size = -(-(size + block // 2 * -(-columns.total // group)) // block) * block
    else:
        order = input_order(torch.arange(columns.first, columns.end) // group)
        block, size = order.block, len(order.group_of_block) * order.block
    meta = torch.device("meta")
    weight = empty(shape.out_features, size, block, layout.code, meta, scale_dtype, not layout.symmetric, False)
    return weight.num_bytes


_DEVIATION = {4: 4.61, 8: 73.9}  # standard deviation of uniformly distributed codes, by bits


class StoredInt(StoredMatrix):
    """This rank's share of one integer matrix, as stored.

    tensors: this rank's share, by kind; with a leading dimension for experts if `num_experts` is given.

    Scales stay in the checkpoint's dtype, which is known once they are loaded.
    """

    def __init__(self, layout: IntFormat, part: Part, num_experts: int | None = None) -> None:
        super().__init__()
        self.layout, self.part = layout, part
        self._shares = layout.tensors(part)
        leading = () if num_experts is None else (num_experts,)
        self.tensors = nn.ParameterDict(
            {
                kind: nn.Parameter(torch.empty(*leading, *share.shape(part), dtype=share.dtype), requires_grad=False)
                for kind, share in self._shares.items()
            }
        )

    def load(self, kind: str, full: Tensor, expert: int | None = None) -> None:
        """Copy this rank's share of the checkpoint's tensor. Raises WrongTensorError for a wrong shape, dtype or order
        of inputs."""
        if kind in self.layout.optional:
            self.layout.check_values(kind, full, self.part)
            return
        share, parameter = self._shares[kind], self.tensors[kind]
        mine = share.cut(full, self.part)
        if share.outputs is None:
            self.layout.check_values(kind, full, self.part)
        if share.dtype is None and parameter.dtype != full.dtype:
            both = full.dtype if not expert else torch.promote_types(parameter.dtype, full.dtype)
            parameter.data = parameter.data.to(both)
        (parameter.data if expert is None else parameter.data[expert]).copy_(mine)

    def fill_dummy(self, generator: torch.Generator) -> None:
        """Fill with random codes for which outputs are as large as inputs."""
        columns = self.part.columns
        for kind, share in self._shares.items():
            tensor = self.tensors[kind].data
            if share.outputs is None:
                inputs = torch.arange(columns.first, columns.end, device=tensor.device)
                tensor.copy_(inputs // (self.layout.group or columns.total))
            else:
                fill_dummy(self.layout, kind, tensor, columns.total, generator)

    def matrix(self, expert: int | None = None) -> dict[str, Tensor]:
        """Return the tensors of the matrix, or of an expert's."""
        return {kind: tensor.data if expert is None else tensor.data[expert] for kind, tensor in self.tensors.items()}


def fill_dummy(layout: IntFormat, kind: str, tensor: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """Fill one tensor of a matrix with random numbers for which outputs are as large as inputs."""
    if tensor.is_floating_point():
        tensor.fill_(fan_in**-0.5 / _DEVIATION[layout.bits])
    elif kind == layout.zeros_kind:
        tensor.fill_(layout.symmetric_word())
    else:
        limits = torch.iinfo(tensor.dtype)
        tensor.random_(limits.min, limits.max, generator=generator)
