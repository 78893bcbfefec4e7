"""All-reduce whose sums are in rank order for every size of message, for deterministic engines.

A library's all-reduce adds in an order that depends on the size of the message. Here collectives only move data, and
each rank adds what it received: `aerie.kernels.collectives.sum_in_order`. Used by `tp_group.TPGroup`.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from aerie.kernels.collectives.sum_in_order import sum_in_order

GATHERED_BYTES = 64 << 10  # up to this size every rank gets all parts; larger messages are summed in shares

# torch 2.13 deprecates the old name with a warning per call; torch 2.11 has no other.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def ordered_all_reduce(x: Tensor, group: dist.ProcessGroup) -> None:
    """Replace x, contiguous, with its sum over the ranks, the same bits on every rank.

    Large messages move as often as in a ring: each rank receives its share of every part, and sends the share's sum.
    """
    size, flat = group.size(), x.view(-1)
    num = flat.numel()
    if num == 0:
        return
    if num * x.itemsize <= GATHERED_BYTES:
        parts = torch.empty(size * num, dtype=x.dtype, device=x.device)
        all_gather_single(parts, flat, group=group)
        flat.copy_(sum_in_order(parts.view(size, num)))
        return
    share = -(-num // size)
    given = flat
    if share * size != num:
        given = torch.nn.functional.pad(flat, (0, share * size - num))
    received = torch.empty_like(given)
    dist.all_to_all_single(received, given, group=group)
    sums = sum_in_order(received.view(size, share))
    if share * size == num:
        all_gather_single(flat, sums, group=group)
    else:
        all_gather_single(received, sums, group=group)
        flat.copy_(received[:num])
