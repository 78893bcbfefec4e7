"""Packs the checkpoint's tensors of stacked matrices of layers and experts for `aerie.kernels.packed`."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.packed.weight import empty, pack
from aerie.kernels.span import Span
from aerie.workers.layers.linear_method import LinearShape
from aerie.workers.quantization.integers.format import Codes, IntFormat
from aerie.workers.quantization.integers.input_order import InputOrder, input_order
from aerie.workers.quantization.packed_linear import PackedPart


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
    device = parts[0].codes.device
    order = order.to(device)
    sorted_parts = [_sorted(codes, order) for codes in parts]
    codes, scales, zeros = (
        torch.cat([getattr(each, name) for each in sorted_parts]).contiguous() for name in ("codes", "scales", "zeros")
    )
    is_symmetric = bool((zeros == layout.symmetric_zero).all())  # a device sync, once per loaded layer
    weight = pack(codes, scales, None if is_symmetric else zeros, None, order.block, layout.code)
    return PackedPart(weight, None if order.gather is None else order.gather.int())


def _sorted(codes: Codes, order: InputOrder) -> Codes:
    """Return codes in `order`, with scales and zeros per block."""
    scales, zeros = (each.index_select(1, order.group_of_block) for each in (codes.scales, codes.zeros))
    if order.gather is None:
        return replace(codes, scales=scales, zeros=zeros)
    values = codes.codes.index_select(1, order.gather)
    if order.is_padding is not None:  # a weight of zero
        values = torch.where(order.is_padding, zeros.repeat_interleave(order.block, 1), values)
    return replace(codes, codes=values, scales=scales, zeros=zeros)


def _padded(codes: Codes, rows: int) -> Codes:
    """Return codes with further rows, of scale zero."""
    values, scales, zeros = (F.pad(each, (0, 0, 0, rows)) for each in (codes.codes, codes.scales, codes.zeros))
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
