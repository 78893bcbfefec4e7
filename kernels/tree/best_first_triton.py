# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel of `best_first`: one launch a level, one program a request.

Which nodes stay is decided by a search for the score of the last one: bit by bit, until the number of scores at or
above it is the wanted one. So nothing is sorted, and the order of drafting is kept by prefix sums.
"""

import torch
import triton
import triton.language as tl

from aerie.kernels.score_order_triton import ordered
from aerie.kernels.tree.nodes import Candidates, Children, Level


@triton.jit
def _are_best(score, there, limit):
    """Return whether each of the scores is among the `limit` largest; among equal ones the first are.

    score: [TOTAL] float32.
    there: [TOTAL], which scores compete; at least `limit`.
    """
    key = ordered(score).to(tl.uint32, bitcast=True) ^ 0x80000000
    key = tl.where(there, key, 0)
    last = tl.zeros([1], tl.uint32)
    bit = tl.full([1], 0x80000000, tl.uint32)
    count = limit * 0 - 1
    step = 0
    while (step < 32) & (count != limit):
        at_least = tl.sum((key >= (last | bit)).to(tl.int32), 0)
        last = tl.where(at_least >= limit, last | bit, last)
        count = tl.where(at_least >= limit, at_least, count)
        bit = bit >> 1
        step += 1
    above = there & (key > last)
    equal = there & (key == last)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= limit - tl.sum(above.to(tl.int32), 0)))


@triton.jit(do_not_specialize=["num_pool", "parents", "num_survivors", "num_rows", "depth"])
def _grow_best(
    score_ptr,
    id_ptr,
    map_ptr,
    pool_token_ptr,
    pool_score_ptr,
    pool_parent_ptr,
    pool_depth_ptr,
    above_score_ptr,
    above_candidate_ptr,
    token_ptr,
    node_score_ptr,
    parent_ptr,
    depth_ptr,
    level_token_ptr,
    level_score_ptr,
    level_candidate_ptr,
    level_parent_ptr,
    num_pool,
    parents,
    num_survivors,
    num_rows,
    depth,
    ROOT: tl.constexpr,
    SHARED: tl.constexpr,
    CUT: tl.constexpr,
    K: tl.constexpr,
    TOTAL: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add one level to the pool of one tree: its best `num_survivors` entries stay.

    score_ptr, id_ptr: [requests, parents, K] log-probabilities and draft ids of the children; [requests, K] if SHARED.
    map_ptr: [draft vocabulary] target ids, or None.
    pool_*_ptr: [requests, num_pool], fields of `Candidates`: the pool before. Not read at the ROOT.
    above_score_ptr, above_candidate_ptr: [requests, parents], fields of the level above, whose nodes have K children
        each. Not read at the ROOT.
    token_ptr, node_score_ptr, parent_ptr, depth_ptr: [requests, num_survivors], the pool after, written.
    level_*_ptr: [requests, num_rows], fields of `Level`: the nodes to expand next, written.
    depth: depth of the children.
    ROOT: the first level.
    SHARED: all nodes of a level have the same children.
    CUT: there are more entries than stay.
    TOTAL: num_pool + parents * K, padded: the entries, first the pool's, then the children.
    ROWS: num_rows, padded.

    `over` is the parent of each entry: first its index in the pool before, then in the pool after, -1 for the root.
    """
    b = tl.program_id(0)
    entry = tl.arange(0, TOTAL)
    in_pool = entry < num_pool
    child = tl.maximum(entry - num_pool, 0)
    is_child = (entry >= num_pool) & (child < parents * K)
    row = b * parents + child // K
    source = (b if SHARED else row) * K + child % K
    score = tl.load(score_ptr + source, mask=is_child, other=float("-inf"))
    score = tl.where(score < float("inf"), score, float("-inf"))
    token = tl.load(id_ptr + source, mask=is_child, other=0)
    if map_ptr is not None:
        token = tl.load(map_ptr + token, mask=is_child, other=0)
    over = entry * 0 - 1
    level_of = entry * 0 + depth
    if not ROOT:
        score += tl.load(above_score_ptr + row, mask=is_child, other=0.0)
        old = b * num_pool + entry
        score = tl.where(in_pool, tl.load(pool_score_ptr + old, mask=in_pool, other=0.0), score)
        token = tl.where(in_pool, tl.load(pool_token_ptr + old, mask=in_pool, other=0), token)
        level_of = tl.where(in_pool, tl.load(pool_depth_ptr + old, mask=in_pool, other=0).to(tl.int32), level_of)
        over = tl.load(above_candidate_ptr + row, mask=is_child, other=-1).to(tl.int32)
        over = tl.where(in_pool, tl.load(pool_parent_ptr + old, mask=in_pool, other=-1).to(tl.int32), over)
    survives = in_pool | is_child
    if CUT:
        survives = _are_best(score, survives, num_survivors)
    rank = tl.cumsum(survives.to(tl.int32), 0) - 1
    if not ROOT:  # from indices in the pool before to those in the pool after; a survivor's parent survives, too
        over = tl.where(over >= 0, tl.gather(rank, tl.maximum(over, 0), 0), -1)
    out = b * num_survivors + rank
    tl.store(token_ptr + out, token, mask=survives)
    tl.store(node_score_ptr + out, score, mask=survives)
    tl.store(parent_ptr + out, over.to(tl.int64), mask=survives)
    tl.store(depth_ptr + out, level_of.to(tl.int64), mask=survives)

    new = (survives & is_child).to(tl.int32)
    at = tl.cumsum(new, 0) - 1
    writes = (new > 0) & (at < num_rows)
    at += b * num_rows
    tl.store(level_token_ptr + at, token, mask=writes)
    tl.store(level_score_ptr + at, score, mask=writes)
    tl.store(level_candidate_ptr + at, rank.to(tl.int64), mask=writes)
    tl.store(level_parent_ptr + at, row.to(tl.int64), mask=writes)
    spare = tl.arange(0, ROWS)
    is_spare = (spare >= tl.sum(new, 0)) & (spare < num_rows)
    spare += b * num_rows
    zero = tl.zeros([ROWS], tl.int64)
    tl.store(level_token_ptr + spare, zero, mask=is_spare)
    tl.store(level_score_ptr + spare, zero.to(tl.float32) + float("-inf"), mask=is_spare)
    tl.store(level_candidate_ptr + spare, zero, mask=is_spare)
    tl.store(level_parent_ptr + spare, zero + b * parents, mask=is_spare)


def grow_best(
    pool: Candidates | None, above: Level | None, children: Children, depth: int, width: int, num_rows: int
) -> tuple[Candidates, Level]:
    """Implement `aerie.kernels.tree.tree_growth.grow_best`: let a level's children compete with the pool of nodes kept
    so far. Return the pool after, and the next level's nodes.

    pool: [B, n] per field; None before the first level.
    above: the level, [B, P] per field; None: the root.
    children: [B * P, k], or [B, k] if all nodes of a level have the same.
    depth: depth of the children.
    width: nodes of a tree, its root included.
    num_rows: nodes of the next level.
    """
    (rows, k), device = children.ids.shape, children.ids.device
    batch, parents = (rows, 1) if above is None else above.tokens.shape
    num_pool = 0 if pool is None else pool.tokens.shape[1]
    total = num_pool + parents * k
    num_survivors = min(total, width - 1)
    tokens, parent_of, depths = torch.empty((3, batch, num_survivors), dtype=torch.int64, device=device).unbind(0)
    scores = torch.empty((batch, num_survivors), dtype=torch.float32, device=device)
    survivors = Candidates(tokens, scores, parent_of, depths, depth)
    level_tokens, candidate, parent = torch.empty((3, batch, num_rows), dtype=torch.int64, device=device).unbind(0)
    level_scores = torch.empty((batch, num_rows), dtype=torch.float32, device=device)
    level = Level(level_tokens, level_scores, candidate, None, parent.flatten())
    old, read = pool or survivors, above or level  # at the root any tensors, which the kernel does not read
    padded = max(16, triton.next_power_of_2(total))
    _grow_best[(batch,)](
        children.log_probabilities,
        children.ids,
        children.target_ids,
        old.tokens,
        old.scores,
        old.parents,
        old.depths,
        read.scores,
        read.candidate,
        tokens,
        scores,
        parent_of,
        depths,
        level_tokens,
        level_scores,
        candidate,
        parent,
        num_pool,
        parents,
        num_survivors,
        num_rows,
        depth,
        ROOT=above is None,
        SHARED=rows == batch,
        CUT=num_survivors < total,
        K=k,
        TOTAL=padded,
        ROWS=triton.next_power_of_2(num_rows),
        num_warps=level_warps(padded),
    )
    return survivors, level


def level_warps(num_competing: int) -> int:
    """Return the warps for a padded number of kept nodes and children. Measured on an H200, all levels of a tree of 63
    nodes with 1, 2, 4 and 8 warps: 181, 66, 53, 46 us; of 128 nodes: 514, 126, 76, 67 us."""
    return max(1, min(8, num_competing // 64))
