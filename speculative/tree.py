"""Draft trees as tensors: B trees of W nodes, node 0 the root (the bonus token), parents before children."""

from dataclasses import dataclass

import torch
from torch import Tensor

NO_TOKEN = -1
MAX_CUT_CANDIDATES = 256  # the kernel that cuts a tree compares each candidate with each


@dataclass(frozen=True)
class Tree:
    """All [B, W] int64. tokens: NO_TOKEN marks a node that cannot be accepted. parents: index in the tree, 0 for the
    root. depths: 0 for the root. masks: bit j of node i is set if j is i or an ancestor of i."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    masks: Tensor


@dataclass(frozen=True)
class RoundRows:
    """What a round verifies: its trees; length [B] int32, the KV committed before it; ids [B * W] int64, the nodes'
    tokens, any where there is none; positions [B * W] int64 of the nodes."""

    tree: Tree
    length: Tensor
    ids: Tensor
    positions: Tensor


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

    @staticmethod
    def empty(batch: int, depths: Tensor, max_depth: int) -> "Candidates":
        """To be filled level by level by `grow`."""
        shape, device = (batch, depths.shape[0]), depths.device
        tokens, parents = torch.empty((2, *shape), dtype=torch.int64, device=device).unbind(0)
        scores = torch.empty(shape, dtype=torch.float32, device=device)
        return Candidates(tokens, scores, parents, depths, max_depth)


@dataclass(frozen=True)
class Level:
    """The expanded nodes of one depth. tokens: [B, k] int64. scores: [B, k] float32. candidate, mask: [B, k] int64,
    their indices among the candidates and the tail columns that they see. parent: [B * k] int64, the row of the level
    above (of the request, for the first level) that each was drafted from."""

    tokens: Tensor
    scores: Tensor
    candidate: Tensor
    mask: Tensor
    parent: Tensor


@dataclass(frozen=True)
class Children:
    """What the head proposes behind the rows of a level: log-probabilities [rows, k] float32, and ids [rows, k] int64
    of the draft's vocabulary; target_ids: [draft vocabulary] int64, or None if the vocabularies are one."""

    log_probabilities: Tensor
    ids: Tensor
    target_ids: Tensor | None


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


def candidate_depths(num_steps: int, top_k: int) -> list[int]:
    """The depth of every candidate: top_k at depth 1, then top_k children of each of the top_k expanded nodes."""
    return [1] * top_k + [depth for depth in range(2, num_steps + 1) for _ in range(top_k**2)]


def grow(candidates: Candidates, above: Level | None, children: Children, first: int, first_bit: int) -> Level:
    """Add the children of a level (None: of the root) to the candidates, from column `first`, and choose the k best of
    them as the next level. first_bit: the tail column of that level's first node."""
    if candidates.scores.is_cuda:
        from speculative.kernels import tree_growth

        return tree_growth.grow(candidates, above, children, first, first_bit)
    rows, k = children.ids.shape
    parents = 1 if above is None else k
    batch, device = rows // parents, children.ids.device
    tokens = children.ids if children.target_ids is None else children.target_ids[children.ids]
    tokens, scores = tokens.view(batch, -1), children.log_probabilities.view(batch, parents, k)
    over = torch.full_like(tokens, -1)
    if above is not None:
        scores = scores + above.scores.unsqueeze(2)
        over = above.candidate.repeat_interleave(k, dim=1)
    scores, columns = scores.flatten(1), slice(first, first + parents * k)
    candidates.tokens[:, columns], candidates.scores[:, columns], candidates.parents[:, columns] = tokens, scores, over
    best, chosen = (t[:, :k] for t in torch.sort(scores, dim=1, descending=True, stable=True))
    parent = chosen // k
    bits = torch.ones(k, dtype=torch.int64, device=device) << (first_bit + torch.arange(k, device=device))
    mask = bits.expand(batch, k) if above is None else above.mask.gather(1, parent) | bits
    rows_above = torch.arange(batch, device=device).unsqueeze(1) * parents + parent
    return Level(tokens.gather(1, chosen), best, chosen + first, mask, rows_above.flatten())


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
    """The tree that each slot will verify next: [num_slots + 1, W] per field. is_chain: none of them ever branches."""

    def __init__(self, num_slots: int, width: int, is_chain: bool, device: torch.device) -> None:
        empty = bare_roots(torch.zeros(num_slots + 1, dtype=torch.int64, device=device), width)
        self._fields = [t.contiguous().clone() for t in (empty.tokens, empty.parents, empty.depths, empty.masks)]
        self._is_chain = is_chain

    def read(self, slots: Tensor, width: int, seq_len: Tensor, mask_words: Tensor | None = None) -> RoundRows:
        """The first `width` nodes of the trees of slots [B] int64, behind seq_len [num_slots + 1] int32. mask_words: on
        GPUs the verifying backend's buffer, which is filled (`attention.backend.AttentionBackend.verify_buffer`)."""
        if slots.is_cuda:
            from speculative.kernels.read_trees import read_trees

            return read_trees(self._fields, slots, width, seq_len, mask_words)
        assert mask_words is None, "no backend of a CPU has a buffer of its own"
        tree = Tree(*(field[slots, :width] for field in self._fields))
        length = seq_len[slots]
        positions = (length.long().unsqueeze(1) + tree.depths).flatten()
        return RoundRows(tree, length, tree.tokens.clamp_min(0).flatten(), positions)

    def write(self, slots: Tensor, tree: Tree) -> None:
        """Replace the trees of slots [B] int64, which must be distinct or padding."""
        fields = (tree.tokens,) if self._is_chain else (tree.tokens, tree.parents, tree.depths, tree.masks)
        for field, value in zip(self._fields, fields, strict=False):
            field[slots] = value

    def write_best(self, slots: Tensor, bonus: Tensor, candidates: Candidates) -> None:
        """Replace the trees of slots [B] int64 by the best of their candidates, under bonus [num_slots + 1] int64."""
        if slots.is_cuda and candidates.scores.shape[1] <= MAX_CUT_CANDIDATES:
            from speculative.kernels.tree_growth import cut

            cut(candidates, slots, bonus, self._fields)
        else:
            self.write(slots, best_tree(bonus[slots], candidates, self._fields[0].shape[1]))
