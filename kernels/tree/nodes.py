"""Draft trees as tensors: B trees of W nodes, with their tree masks. Node 0 is the root (the bonus token). Parents
precede children, and likelier nodes precede less likely ones.

`aerie.kernels.tree.tree_growth` grows trees, `aerie.speculative.tree_table` stores them,
`aerie.kernels.tree.acceptance` compares them with the target.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.kv.mask_bits import MASK_BITS
from aerie.kernels.kv.tree_masks import as_bits, chain_spans, without_dead

NO_TOKEN = -1


@dataclass(frozen=True)
class Tree:
    """All [B, W] int64.

    tokens: NO_TOKEN marks a node that cannot be accepted.
    parents: index in the tree; 0 for the root.
    depths: 0 for the root.
    masks: the tree mask, which says of each node which are itself or its ancestors: `aerie.kernels.kv.tree_masks`.
        Bits up to 63 nodes, spans beyond. The slots' trees all have the encoding of the widest.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    masks: Tensor

    @property
    def fields(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return all fields, in this order."""
        return self.tokens, self.parents, self.depths, self.masks


@dataclass(frozen=True)
class RoundRows:
    """The rows that a round verifies.

    tree: one tree per request.
    length: [B] int32 committed KV tokens before the round.
    ids: [B * W] int64 the nodes' tokens; 0 for NO_TOKEN.
    positions: [B * W] int64 positions of the nodes.
    mask_words: the masks in the verifying backend's own buffer, if it has one.
    """

    tree: Tree
    length: Tensor
    ids: Tensor
    positions: Tensor
    mask_words: Tensor | None = None


@dataclass(frozen=True)
class Candidates:
    """Drafted nodes in the order of drafting, C per request, parents before children.

    tokens: [B, C] int64.
    scores: [B, C] float32 log-probability of the path, so no node's exceeds its parent's.
    parents: [B, C] int64 index of a candidate; -1 for the root.
    depths: [C] int64, or [B, C] if requests have different ones; at most max_depth.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    depths: Tensor
    max_depth: int

    @staticmethod
    def empty(batch: int, depths: Tensor, max_depth: int) -> "Candidates":
        """Allocate candidates, which `aerie.kernels.tree.tree_growth.grow` fills level by level."""
        shape, device = (batch, depths.shape[0]), depths.device
        tokens, parents = torch.empty((2, *shape), dtype=torch.int64, device=device).unbind(0)
        scores = torch.empty(shape, dtype=torch.float32, device=device)
        return Candidates(tokens, scores, parents, depths, max_depth)


@dataclass(frozen=True)
class Level:
    """The expanded nodes of one depth.

    tokens: [B, k] int64.
    scores: [B, k] float32.
    candidate: [B, k] int64 index of each among the candidates.
    mask: [B, k] int64 suffix columns that each sees; None for block drafts, whose nodes have no KV.
    parent: [B * k] int64 row of the level above that each was drafted from; in the first level, row of the request.
    """

    tokens: Tensor
    scores: Tensor
    candidate: Tensor
    mask: Tensor | None
    parent: Tensor


@dataclass(frozen=True)
class Children:
    """The draft's proposals after the rows of a level.

    log_probabilities: [rows, k] float32, descending.
    ids: [rows, k] int64, draft ids.
    target_ids: [draft vocabulary] int64 target id of each; None if the vocabularies are equal.
    """

    log_probabilities: Tensor
    ids: Tensor
    target_ids: Tensor | None


def check_trees(trees: Tree) -> None:
    """Assert that all fields of the slots' trees are contiguous and of one shape, as kernels require. Reads no
    values."""
    for field in trees.fields:
        assert field.shape == trees.tokens.shape and field.dtype == torch.int64 and field.is_contiguous()


def chain(root: Tensor, tokens: Tensor) -> Tree:
    """Return trees without branches: root [B], then tokens [B, W - 1] int64."""
    batch, width = tokens.shape[0], tokens.shape[1] + 1
    node = torch.arange(width, device=root.device)
    wide = width > MASK_BITS
    masks = chain_spans(width, root.device) if wide else (torch.ones_like(node) << (node + 1)) - 1
    return Tree(
        tokens=torch.cat((root.unsqueeze(1), tokens), dim=1),
        parents=(node - 1).clamp_min(0).expand(batch, width),
        depths=node.expand(batch, width),
        masks=masks.expand(batch, width),
    )


def trimmed(tree: Tree, max_depth: int, as_chain: bool, spans: bool = False) -> Tree:
    """Return trees in which no node deeper than max_depth can be accepted.

    as_chain: keep only the leading nodes that form a chain.
    spans: the masks of `tree` are spans of nodes, even if the trees have at most MASK_BITS nodes; the result then has
        bits for at most MASK_BITS nodes, else spans.
    """
    node = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    alive = tree.depths <= max_depth
    if as_chain:
        alive &= (tree.parents == (node - 1).clamp_min(0)).cumprod(1).bool()
    tokens = torch.where(alive, tree.tokens, NO_TOKEN)
    if as_chain:
        return chain(tokens[:, 0], tokens[:, 1:])
    masks = without_dead(tree.masks, tokens != NO_TOKEN) if spans else tree.masks
    if spans and tokens.shape[1] <= MASK_BITS:
        masks = as_bits(masks)
    return Tree(tokens, tree.parents, tree.depths, masks)


def root_only_trees(root: Tensor, width: int) -> Tree:
    """Return trees in which only the root [B] can be accepted."""
    nothing = torch.full((root.shape[0], width - 1), NO_TOKEN, dtype=torch.int64, device=root.device)
    return chain(root, nothing)
