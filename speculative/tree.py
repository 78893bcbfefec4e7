"""Draft trees as tensors: B trees of W nodes, node 0 the root (the bonus token), parents before children."""

from dataclasses import dataclass

import torch
from torch import Tensor

NO_TOKEN = -1


@dataclass(frozen=True)
class Tree:
    """All [B, W] int64. tokens: NO_TOKEN marks a node that cannot be accepted. parents: index in the tree, 0 for the
    root. depths: 0 for the root. masks: bit j of node i is set if j is i or an ancestor of i."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    masks: Tensor


@dataclass(frozen=True)
class Candidates:
    """Drafted nodes in the order they were drafted, C per request, a parent before its children. tokens: [B, C] int64.
    scores: [B, C] float32, the log-probability of the path, so no node's exceeds its parent's. parents: [B, C] int64,
    index of a candidate, -1 for the root. depths: [C] int64, at most max_depth."""

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    depths: Tensor
    max_depth: int


def chain(root: Tensor, tokens: Tensor) -> Tree:
    """Trees without branches: root [B], tokens [B, W - 1] int64 below it."""
    batch, width = tokens.shape[0], tokens.shape[1] + 1
    node = torch.arange(width, device=root.device)
    masks = (torch.ones_like(node) << (node + 1)) - 1
    return Tree(
        tokens=torch.cat((root.unsqueeze(1), tokens), dim=1),
        parents=(node - 1).clamp_min(0).expand(batch, width),
        depths=node.expand(batch, width),
        masks=masks.expand(batch, width),
    )


def bare_roots(root: Tensor, width: int) -> Tree:
    """Trees of which only the root [B] can be accepted."""
    nothing = torch.full((root.shape[0], width - 1), NO_TOKEN, dtype=torch.int64, device=root.device)
    return chain(root, nothing)


def best_tree(root: Tensor, candidates: Candidates, width: int) -> Tree:
    """The width - 1 candidates of the highest score, under root [B] (EAGLE-2, arXiv 2406.16858, section 4.2).

    The sort is stable: of equal scores the one drafted first wins, so that a kept node's parent is kept too.
    """
    order = torch.sort(candidates.scores, dim=1, descending=True, stable=True).indices[:, : width - 1]
    kept = order.sort(dim=1).values
    batch, node = root.shape[0], torch.arange(1, width, device=root.device)
    place = torch.zeros((batch, candidates.scores.shape[1] + 1), dtype=torch.int64, device=root.device)
    place.scatter_(1, kept + 1, node.expand(batch, -1))  # place[c + 1]: where candidate c went; place[0]: the root
    parents = place.gather(1, candidates.parents.gather(1, kept) + 1)
    zero = torch.zeros_like(root).unsqueeze(1)
    parents = torch.cat((zero, parents), dim=1)
    return Tree(
        tokens=torch.cat((root.unsqueeze(1), candidates.tokens.gather(1, kept)), dim=1),
        parents=parents,
        depths=torch.cat((zero, candidates.depths[kept]), dim=1),
        masks=_ancestor_masks(parents, candidates.max_depth),
    )


def _ancestor_masks(parents: Tensor, max_depth: int) -> Tensor:
    """[B, W] int64: each node's own bit and its ancestors', by following `parents` max_depth times."""
    own = torch.ones_like(parents) << torch.arange(parents.shape[1], device=parents.device)
    masks = own
    for _ in range(max_depth):
        masks = own | masks.gather(1, parents)
    return masks


class TreeTable:
    """The tree that each slot will verify next: [num_slots + 1, W] per field."""

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        empty = bare_roots(torch.zeros(num_slots + 1, dtype=torch.int64, device=device), width)
        self._fields = [
            t.contiguous().clone() for t in (empty.tokens, empty.parents, empty.depths, empty.masks)
        ]

    def read(self, slots: Tensor, width: int) -> Tree:
        """The first `width` nodes of the trees of slots [B] int64."""
        return Tree(*(field[slots, :width] for field in self._fields))

    def write(self, slots: Tensor, tree: Tree) -> None:
        """Replace the trees of slots [B] int64, which must be distinct or padding."""
        for field, value in zip(self._fields, (tree.tokens, tree.parents, tree.depths, tree.masks), strict=True):
            field[slots] = value
