"""Grows a draft tree level by level, and selects the nodes to verify, in one of two ways.

`grow` and `write_best` are EAGLE-2 (arXiv 2406.16858, section 4): a fixed number of nodes of each level is expanded.
`grow_best` and `grow_block` find the best tree of a given number of nodes. A node's score never exceeds its parent's.
So the children of the newest level's nodes compete with all nodes so far, and the best `width - 1` of both stay. A heap
that expands one node after another finds the same tree (tests/speculative/tree/test_best_first.py)."""

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
    for tensor in () if above is None else (above.scores, above.candidate, above.mask):
        assert tensor is not None and tensor.shape[1] == children.ids.shape[1] and tensor.is_contiguous()


def _check_cut(trees: Tree, slots: Tensor, bonus: Tensor, candidates: Candidates, width: int) -> None:
    check_trees(trees)
    check_slots(slots)
    assert width <= trees.tokens.shape[1] and bonus.dtype == torch.int64
    for tensor in (candidates.tokens, candidates.scores, candidates.parents):
        assert tensor.shape == candidates.scores.shape and tensor.is_contiguous()


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
    best = torch.sort(candidates.scores, dim=1, descending=True, stable=True).indices[:, : width - 1]
    batch, node = root.shape[0], torch.arange(1, width, device=root.device)
    node_of = torch.zeros((batch, candidates.scores.shape[1] + 1), dtype=torch.int64, device=root.device)
    node_of.scatter_(1, best + 1, node.expand(batch, -1))  # node_of[c + 1]: candidate c; node_of[0]: the root
    parents = node_of.gather(1, candidates.parents.gather(1, best) + 1)
    zero = torch.zeros_like(root).unsqueeze(1)
    parents = torch.cat((zero, parents), dim=1)
    return Tree(
        tokens=torch.cat((root.unsqueeze(1), candidates.tokens.gather(1, best)), dim=1),
        parents=parents,
        depths=torch.cat((zero, candidates.depths.expand(root.shape[0], -1).gather(1, best)), dim=1),
        masks=(span_masks if spans else _ancestor_masks)(parents, candidates.max_depth),
    )


def _ancestor_masks(parents: Tensor, max_depth: int) -> Tensor:
    """Return [B, W] int64: bits of each node and its ancestors, following `parents` max_depth times."""
    own = torch.ones_like(parents) << torch.arange(parents.shape[1], device=parents.device)
    masks = own
    for _ in range(max_depth):
        masks = own | masks.gather(1, parents)
    return masks


MAX_COMPETING = 4096  # kept nodes and children of a level: the kernel holds a score of each in registers
# A node's place in the order of drafting is one int64 in the kernel of a whole tree: its level, the ranks of its path's
# nodes, and its parent.
PARENT_BITS, MAX_PATH_BITS = 9, 49


def level_rows(depth: int, num_steps: int, top_k: int, width: int) -> int:
    """Return the largest number of nodes of a tree's level at `depth` that may have children among the best.

    A node at `depth` has an ancestor on each level above, which also takes a place.
    """
    if depth == num_steps:
        return 1  # the last level has no children
    rows = 1
    for above in range(1, depth + 1):
        rows = max(1, min(rows * top_k, width - above))
    return rows


def _check(
    pool: Candidates | None, above: Level | None, children: Children, depth: int, width: int, num_rows: int
) -> None:
    assert children.ids.shape == children.log_probabilities.shape and (pool is None) == (above is None)
    assert children.ids.is_contiguous() and children.log_probabilities.is_contiguous() and num_rows >= 1
    assert children.log_probabilities.dtype == torch.float32 and children.ids.dtype == torch.int64
    if above is not None and pool is not None:
        assert above.scores.is_contiguous() and above.candidate.is_contiguous()
        assert children.ids.shape[0] in (above.scores.numel(), above.scores.shape[0])
        for tensor in (pool.tokens, pool.scores, pool.parents, pool.depths):
            assert tensor.shape == pool.tokens.shape and tensor.is_contiguous()


def _competing(above: Level | None, pool: Candidates | None, top_k: int) -> int:
    pool_size = 0 if pool is None else pool.tokens.shape[1]
    return pool_size + top_k * (1 if above is None else above.tokens.shape[1])


@operation(
    Implementation(
        "triton",
        "aerie.kernels.tree.best_first_triton:grow_best",
        on_gpu,
        lambda pool, above, children, *_: _competing(above, pool, children.ids.shape[1]) <= MAX_COMPETING,
        f"at most {MAX_COMPETING} kept nodes and children",
    ),
    contract=_check,
)
def grow_best(
    pool: Candidates | None, above: Level | None, children: Children, depth: int, width: int, num_rows: int
) -> tuple[Candidates, Level]:
    """Let a level's children compete with the nodes kept so far. Return the nodes kept, and those that may have
    children.

    pool      [B, n] per field, contiguous: nodes kept so far, in the order of drafting; None before the first level
    above     P nodes of the level above per request, contiguous; None: the root
    children  [B * P, k], contiguous, or [B, k] if all nodes of a level have the same; NaN and plus infinity rank like
              masked tokens
    depth     depth of the children
    width     nodes of a tree, its root included
    num_rows  rows of the next level; further nodes get no children
    ->        The best min(n + P * k, width - 1) nodes, in the order of drafting; among equal scores the one drafted
              first stays. Their depths are [B, C].
              The next level: the kept children in the order of drafting; rows beyond their number have score minus
              infinity, parent row 0 and token 0. Its masks are None.
    """
    batch = children.ids.shape[0] if above is None else above.tokens.shape[0]
    parents, top_k = 1 if above is None else above.tokens.shape[1], children.ids.shape[1]
    device, is_shared = children.ids.device, children.ids.shape[0] == batch
    ids = children.ids if children.target_ids is None else children.target_ids[children.ids]
    log_probabilities = children.log_probabilities
    log_probabilities = torch.where(log_probabilities < float("inf"), log_probabilities, float("-inf"))
    shape = (batch, 1 if is_shared else parents, top_k)
    tokens, scores = (field.view(shape).expand(-1, parents, -1) for field in (ids, log_probabilities))
    over = torch.full((batch, parents, top_k), -1, device=device)
    if above is not None:
        scores = scores + above.scores.unsqueeze(2)
        over = above.candidate.unsqueeze(2).expand(-1, -1, top_k)
    depths = torch.full_like(over, depth)
    fields = [field.flatten(1) for field in (tokens, scores, over, depths)]
    num_pool = 0
    if pool is not None:
        num_pool = pool.tokens.shape[1]
        earlier = (pool.tokens, pool.scores, pool.parents, pool.depths)
        fields = [torch.cat(pair, dim=1) for pair in zip(earlier, fields, strict=True)]
    size = min(fields[0].shape[1], width - 1)
    best = torch.sort(fields[1], dim=1, descending=True, stable=True).indices[:, :size].sort(1).values
    rank_of = torch.full_like(fields[0], -1).scatter(1, best, torch.arange(size, device=device).expand(batch, -1))
    tokens, scores, over, depths = (field.gather(1, best) for field in fields)
    over = torch.where(over < 0, over, rank_of.gather(1, over.clamp_min(0)))
    survivors = Candidates(tokens, scores, over, depths, depth)

    is_new = best >= num_pool
    row = torch.where(is_new, is_new.cumsum(1) - 1, num_rows).clamp_max(num_rows)
    first_row = torch.arange(batch, device=device).unsqueeze(1) * parents
    row_above = first_row + torch.where(is_new, (best - num_pool) // top_k, 0)

    def next_level(values: Tensor, other: Tensor | float) -> Tensor:
        out = torch.empty((batch, num_rows + 1), dtype=values.dtype, device=device)
        out[:] = other
        return out.scatter(1, row, values)[:, :num_rows].contiguous()

    candidate = next_level(torch.arange(size, device=device).expand(batch, -1), 0)
    parent = next_level(row_above, first_row).flatten()
    return survivors, Level(next_level(tokens, 0), next_level(scores, float("-inf")), candidate, None, parent)


def _check_block(children: Children, width: int) -> None:
    assert children.ids.shape == children.log_probabilities.shape and children.ids.dim() == 3 and width >= 2
    assert children.ids.is_contiguous() and children.log_probabilities.is_contiguous()
    assert children.log_probabilities.dtype == torch.float32 and children.ids.dtype == torch.int64
    assert width - 1 <= _num_nodes(children.ids.shape[1], children.ids.shape[2], width)


def _num_nodes(num_steps: int, top_k: int, limit: int) -> int:
    """Return the number of nodes of all paths, counted up to `limit` a level."""
    nodes = level = 1
    for _ in range(num_steps):
        level = min(level * top_k, limit)
        nodes += level
    return nodes - 1


def rank_bits(top_k: int) -> int:
    """Return the bits of a child's rank among `top_k`."""
    return max(1, (top_k - 1).bit_length())


@operation(
    Implementation(
        "triton",
        "aerie.kernels.tree.tree_growth_triton:grow_block",
        on_gpu,
        lambda children, width: children.ids.shape[1] * rank_bits(children.ids.shape[2]) <= MAX_PATH_BITS,
        f"levels and children whose ranks fit into {MAX_PATH_BITS} bits a path",
    ),
    contract=_check_block,
)
def grow_block(children: Children, width: int) -> Candidates:
    """Return the best nodes of trees in which all nodes of a level have the same children.

    children  [B, num_steps, k], contiguous, the best child first; NaN, plus infinity, and what follows them in a row
              rank like masked tokens
    width     nodes of a tree, its root included; at most those of all paths
    ->        `width` - 1 nodes, best first; among equal scores that of the lower depth, then in the order of drafting.
              Their depths are [B, C].
    """
    batch, num_steps, top_k = children.ids.shape
    scores = children.log_probabilities
    is_broken = (~(scores < float("inf"))).cumsum(2) > 0
    scores = scores.masked_fill(is_broken, float("-inf"))
    pool, level = None, None
    for depth in range(1, num_steps + 1):
        at_depth = Children(scores[:, depth - 1].contiguous(), children.ids[:, depth - 1].contiguous(), None)
        rows = level_rows(depth, num_steps, top_k, width)
        pool, level = grow_best.reference(pool, level, at_depth, depth, width, rows)
    assert pool is not None, "a tree has levels"
    best = torch.sort(pool.scores, dim=1, descending=True, stable=True).indices
    rank_of = torch.empty_like(best).scatter(1, best, torch.arange(width - 1, device=best.device).expand(batch, -1))
    tokens, sorted_scores, parents, depths = (
        field.gather(1, best) for field in (pool.tokens, pool.scores, pool.parents, pool.depths)
    )
    if children.target_ids is not None:
        tokens = children.target_ids[tokens]
    parents = torch.where(parents < 0, parents, rank_of.gather(1, parents.clamp_min(0)))
    return Candidates(tokens, sorted_scores, parents, depths, num_steps)
