"""Masks of a round's rows: which suffix columns each row sees, in one int64 a row.

Up to MASK_BITS columns: bit j is set if the row sees column j. More columns, which are the nodes of a tree: a span of
the tree's numbering in pre-order. Bits 0-15 are the node's number, bits 16-31 the end of its subtree, bits 32-47 the
number of nodes on its path, itself included. Row i sees column j exactly if number[j] <= number[i] < end[j].
Any part of a tree's nodes keeps its spans, so a narrower tree needs no other numbers.
"""

import torch
from torch import Tensor

from aerie.kernels.kv.mask_bits import MASK_BITS

ALONE = 1 << 15  # numbers from here on belong to nodes that no other node sees


def seen_columns(mask: Tensor, columns: int) -> Tensor:
    """Return [B, R, columns] bool: whether each row sees each column, of mask [B, R] int64. R = columns for spans."""
    if columns <= MASK_BITS:
        return (mask.unsqueeze(2) >> torch.arange(columns, device=mask.device) & 1).bool()
    number, end = mask & 0xFFFF, mask >> 16 & 0xFFFF
    return (number.unsqueeze(1) <= number.unsqueeze(2)) & (number.unsqueeze(2) < end.unsqueeze(1))


def span_masks(parents: Tensor, max_depth: int) -> Tensor:
    """Return the spans [B, W] int64 of trees with parents [B, W] int64, which precede their children; the root is node
    0. Siblings are numbered in order."""
    width = parents.shape[1]
    own = torch.eye(width, dtype=torch.bool, device=parents.device)
    path = own.expand(parents.shape[0], -1, -1)
    for _ in range(max_depth):
        path = own | path.gather(1, parents.unsqueeze(2).expand(-1, -1, width))
    node = torch.arange(width, device=parents.device)
    earlier = (parents.unsqueeze(1) == parents.unsqueeze(2)) & (node < node.unsqueeze(1)) & (node > 0)
    size = path.sum(1)
    skipped = torch.where(node > 0, 1 + (earlier * size.unsqueeze(1)).sum(2), 0)
    number = (path * skipped.unsqueeze(1)).sum(2)
    return number | (number + size) << 16 | path.sum(2) << 32


def chain_spans(width: int, device: torch.device) -> Tensor:
    """Return the spans [width] int64 of a chain."""
    node = torch.arange(width, device=device)
    return node | width << 16 | (node + 1) << 32


def without_dead(masks: Tensor, alive: Tensor) -> Tensor:
    """Return spans [B, W] in which nodes that are not alive [B, W] bool are seen by no other node."""
    number = ALONE + torch.arange(masks.shape[1], device=masks.device)
    return torch.where(alive, masks, number | (number + 1) << 16 | 1 << 32)


def as_bits(spans: Tensor) -> Tensor:
    """Return the bits [B, W] int64 of spans, for W up to MASK_BITS."""
    column = torch.arange(spans.shape[1], device=spans.device)
    number, end = spans & 0xFFFF, spans >> 16 & 0xFFFF
    seen = (number.unsqueeze(1) <= number.unsqueeze(2)) & (number.unsqueeze(2) < end.unsqueeze(1))
    return (seen.long() << column).sum(2)
