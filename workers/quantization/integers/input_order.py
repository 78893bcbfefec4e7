"""Orders a rank's inputs so that each scale belongs to a whole block, as `aerie.kernels.packed` requires.

Groups may have arbitrary inputs (GPTQ's desc_act, compressed-tensors' g_idx), and a rank's shard may split a group.
Inputs are then sorted by group, and each group is padded to whole blocks with inputs of weight zero.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_STEP = 32  # blocks are multiples of it: `aerie.kernels.packed.weight.pack`


@dataclass(frozen=True)
class InputOrder:
    """block: inputs that share a scale.
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
