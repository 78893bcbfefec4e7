"""Growing a draft tree level by level, and cutting it to the nodes that are verified. Called by `speculative.drafter`
and `speculative.tree_table`; on GPUs `speculative.kernels.tree_growth` does both, and this is its reference."""

import torch
from torch import Tensor

from speculative.tree import Candidates, Children, Level, Tree


def grow(candidates: Candidates, above: Level | None, children: Children, first: int, first_bit: int) -> Level:
    """Add the children of a level (None: of the root) to the candidates, from column `first`, and choose the k best of
    them as the next level. first_bit: the tail column of that level's first node."""
    if candidates.scores.is_cuda:
        from speculative.kernels import tree_growth as kernel

        return kernel.grow(candidates, above, children, first, first_bit)
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
    """The width - 1 candidates of the highest score, best first, under root [B] (EAGLE-2, arXiv 2406.16858, section
    4.2). So the first nodes of a tree are what a narrower one of the same candidates would be.

    The sort is stable: of equal scores the one drafted first wins, so that a kept node's parent is kept too, before it.
    """
    kept = torch.sort(candidates.scores, dim=1, descending=True, stable=True).indices[:, : width - 1]
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
