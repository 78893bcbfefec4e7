"""Grows a draft tree level by level, and selects the nodes to verify (EAGLE-2, arXiv 2406.16858, section 4)."""

import torch
from torch import Tensor

from aerie.kernels.contracts import check_slots
from aerie.kernels.kv.mask_bits import MASK_BITS
from aerie.kernels.kv.tree_masks import span_masks
from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.tree.nodes import Candidates, Children, Level, Tree, check_trees

MAX_CUT_CANDIDATES = 1024  # the kernel sorts them in registers


def _check_level(candidates: Candidates, above: Level | None, children: Children, first: int, first_bit: int) -> None:
    assert children.ids.shape == children.log_probabilities.shape
    assert children.ids.is_contiguous() and children.log_probabilities.is_contiguous()
    assert (
        candidates.tokens.is_contiguous() and candidates.scores.is_contiguous() and candidates.parents.is_contiguous()
    )
    for each in () if above is None else (above.scores, above.candidate, above.mask):
        assert each is not None and each.shape[1] == children.ids.shape[1] and each.is_contiguous()


def _check_cut(trees: Tree, slots: Tensor, bonus: Tensor, candidates: Candidates, width: int) -> None:
    check_trees(trees)
    check_slots(slots)
    assert width <= trees.tokens.shape[1] and bonus.dtype == torch.int64
    for each in (candidates.tokens, candidates.scores, candidates.parents):
        assert each.shape == candidates.scores.shape and each.is_contiguous()


@operation(Implementation("triton", "aerie.kernels.tree.tree_growth_triton:grow", on_gpu), contract=_check_level)
def grow(candidates: Candidates, above: Level | None, children: Children, first: int, first_bit: int) -> Level:
    """Add the children of a level to the candidates, and return the k best of them as the next level.

    candidates  [B, C] per field; columns first to first + parents * k are written
    above       the level, k nodes per request, contiguous; None: the root
    children    [B * parents, k], contiguous; equal scores rank by column, NaN and plus infinity rank like masked tokens
    first       column of the first child
    first_bit   suffix column of the next level's first node
    ->          the next level, k nodes per request, best first
    """
    rows, k = children.ids.shape
    parents = 1 if above is None else k
    batch, device = rows // parents, children.ids.device
    tokens = children.ids if children.target_ids is None else children.target_ids[children.ids]
    tokens, scores = tokens.view(batch, -1), children.log_probabilities.view(batch, parents, k)
    scores = torch.where(scores < float("inf"), scores, float("-inf"))
    over = torch.full_like(tokens, -1)
    if above is not None:
        scores = scores + above.scores.unsqueeze(2)
        over = above.candidate.repeat_interleave(k, dim=1)
    scores, columns = scores.flatten(1), slice(first, first + parents * k)
    candidates.tokens[:, columns], candidates.scores[:, columns], candidates.parents[:, columns] = tokens, scores, over
    best, chosen = (t[:, :k].contiguous() for t in torch.sort(scores, dim=1, descending=True, stable=True))
    parent = chosen // k
    bits = torch.ones(k, dtype=torch.int64, device=device) << (first_bit + torch.arange(k, device=device))
    mask = bits.repeat(batch, 1)
    if above is not None and above.mask is not None:
        mask |= above.mask.gather(1, parent)
    rows_above = torch.arange(batch, device=device).unsqueeze(1) * parents + parent
    return Level(tokens.gather(1, chosen), best, chosen + first, mask, rows_above.flatten())


@operation(
    Implementation(
        "triton",
        "aerie.kernels.tree.tree_growth_triton:write_best",
        on_gpu,
        lambda trees, slots, bonus, candidates, width: candidates.scores.shape[1] <= MAX_CUT_CANDIDATES,
        f"at most {MAX_CUT_CANDIDATES} candidates",
    ),
    contract=_check_cut,
)
def write_best(trees: Tree, slots: Tensor, bonus: Tensor, candidates: Candidates, width: int) -> None:
    """Replace the trees of some slots by the `best_tree` of their candidates.

    trees       [num_slots + 1, W] per field, contiguous, W >= width; the first `width` nodes of `slots` are written
    slots       [B] int64, distinct or padding
    bonus       [num_slots + 1] int64, the newest token of each slot
    candidates  [B, C] per field
    """
    spans = trees.tokens.shape[1] > MASK_BITS
    write_trees(trees, slots, best_tree(bonus[slots], candidates, width, spans))


def write_trees(trees: Tree, slots: Tensor, tree: Tree) -> None:
    """Write trees [B, n] over the first n nodes of slots [B] int64, which are distinct or padding."""
    width = tree.tokens.shape[1]
    trees.tokens[slots, :width] = tree.tokens
    trees.parents[slots, :width] = tree.parents
    trees.depths[slots, :width] = tree.depths
    trees.masks[slots, :width] = tree.masks


def best_tree(root: Tensor, candidates: Candidates, width: int, spans: bool | None = None) -> Tree:
    """Return the tree of root [B] and the `width - 1` candidates with the highest scores, best first (section 4.2). The
    first nodes of a tree are thus the narrower tree of the same candidates.

    The sort is stable: among equal scores, the candidate drafted first wins. So a node's parent is selected, too, and
    precedes it. spans: whether the masks are spans; None: if the tree has more nodes than bits.
    """
    spans = width > MASK_BITS if spans is None else spans
    kept = torch.sort(candidates.scores, dim=1, descending=True, stable=True).indices[:, : width - 1]
    batch, node = root.shape[0], torch.arange(1, width, device=root.device)
    place = torch.zeros((batch, candidates.scores.shape[1] + 1), dtype=torch.int64, device=root.device)
    place.scatter_(1, kept + 1, node.expand(batch, -1))  # place[c + 1]: index of candidate c; place[0]: the root
    parents = place.gather(1, candidates.parents.gather(1, kept) + 1)
    zero = torch.zeros_like(root).unsqueeze(1)
    parents = torch.cat((zero, parents), dim=1)
    return Tree(
        tokens=torch.cat((root.unsqueeze(1), candidates.tokens.gather(1, kept)), dim=1),
        parents=parents,
        depths=torch.cat((zero, candidates.depths.expand(root.shape[0], -1).gather(1, kept)), dim=1),
        masks=(span_masks if spans else _ancestor_masks)(parents, candidates.max_depth),
    )


def _ancestor_masks(parents: Tensor, max_depth: int) -> Tensor:
    """Return [B, W] int64: bits of each node and its ancestors, following `parents` max_depth times."""
    own = torch.ones_like(parents) << torch.arange(parents.shape[1], device=parents.device)
    masks = own
    for _ in range(max_depth):
        masks = own | masks.gather(1, parents)
    return masks
