# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of `aerie.kernels.tree.tree_growth`, with one program per request: `_grow`, one launch per level instead of a
dozen; `_cut`, one launch for the selection instead of fifty; `_grow_block`, one launch with one warp per program.

`_grow_block` expands one node after another, as a heap does. The nodes that may come next lie in registers: of each
expanded node its first child, and of each child but the last its next sibling. So there is one more such node than
expanded nodes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.kv.mask_bits import MASK_BITS
from aerie.kernels.score_order_triton import index_of, sort_key
from aerie.kernels.tree import tree_growth
from aerie.kernels.tree.nodes import Candidates, Children, Level, Tree
from aerie.kernels.tree.tree_growth import MAX_CUT_CANDIDATES


@triton.jit
def _grow(
    score_ptr,
    id_ptr,
    map_ptr,
    above_score_ptr,
    above_candidate_ptr,
    above_mask_ptr,
    candidate_token_ptr,
    candidate_score_ptr,
    candidate_parent_ptr,
    token_ptr,
    level_score_ptr,
    candidate_ptr,
    mask_ptr,
    parent_ptr,
    num_candidates,
    first,
    first_bit,
    HAS_MAP: tl.constexpr,
    ROOT: tl.constexpr,
    PARENTS: tl.constexpr,
    K: tl.constexpr,
    CHILDREN: tl.constexpr,
):
    """Append the PARENTS * K children of a request's level to its candidates, and write the K with the best paths as
    the next level.

    score_ptr, id_ptr: [requests, PARENTS, K] log-probabilities and draft ids.
    map_ptr: [draft vocabulary] target ids; not read without HAS_MAP.
    above_score_ptr, above_candidate_ptr, above_mask_ptr: [requests, PARENTS], fields of the level above; not read at
        the ROOT.
    candidate_token_ptr, candidate_score_ptr, candidate_parent_ptr: [requests, num_candidates], fields of `Candidates`,
        written from column `first` on.
    token_ptr .. parent_ptr: [requests, K], fields of `Level`, written.
    first: column of the first child among the candidates.
    first_bit: suffix column, and so bit in the masks, of the next level's first node.
    CHILDREN: PARENTS * K, padded.
    """
    b = tl.program_id(0)
    child = tl.arange(0, CHILDREN)
    there = child < PARENTS * K
    parent = child // K
    score = tl.load(score_ptr + b * PARENTS * K + child, mask=there, other=float("-inf"))
    score = tl.where(score < float("inf"), score, float("-inf"))  # `_cut` ranks by comparing
    token = tl.load(id_ptr + b * PARENTS * K + child, mask=there, other=0)
    if HAS_MAP:
        token = tl.load(map_ptr + token, mask=there, other=0)
    above = child * 0 - 1
    if not ROOT:
        score += tl.load(above_score_ptr + b * PARENTS + parent, mask=there, other=0.0)
        above = tl.load(above_candidate_ptr + b * PARENTS + parent, mask=there, other=0)
    out = b * num_candidates + first + child
    tl.store(candidate_token_ptr + out, token, mask=there)
    tl.store(candidate_score_ptr + out, score, mask=there)
    tl.store(candidate_parent_ptr + out, above.to(tl.int64), mask=there)
    left, number = score, child
    for i in tl.static_range(K):
        best = tl.max(left, 0)
        # chosen nodes become -inf like masked tokens, and rank after all children
        chosen = tl.min(tl.where((left == best) & there, number, CHILDREN), 0)
        chosen = tl.minimum(chosen, PARENTS * K - 1)
        here = child == chosen
        bit = (tl.full([1], 1, tl.int64) << (first_bit + i)).sum(0)
        seen = bit
        if not ROOT:
            seen = bit | tl.load(above_mask_ptr + b * PARENTS + chosen // K)
        tl.store(token_ptr + b * K + i, tl.sum(tl.where(here, token, 0), 0))
        tl.store(level_score_ptr + b * K + i, best)
        tl.store(candidate_ptr + b * K + i, (first + chosen).to(tl.int64))
        tl.store(mask_ptr + b * K + i, seen)
        tl.store(parent_ptr + b * K + i, (b * PARENTS + chosen // K).to(tl.int64))
        left = tl.where(here, float("-inf"), left)
        number = tl.where(here, CHILDREN, number)


def grow(candidates: Candidates, above: Level | None, children: Children, first: int, first_bit: int) -> Level:
    """Implement `aerie.kernels.tree.tree_growth.grow`: write the children of a level to the candidates, and return the
    k best of them as the next level.

    candidates: [B, C] per field; the columns from `first` on are written.
    above: the level, [B, k] per field; None: the children are those of the root.
    children: [B * parents, k].
    first: column of the first child.
    first_bit: suffix column, and so bit in the masks, of the next level's first node.
    """
    k = children.ids.shape[1]
    parents = 1 if above is None else k
    batch, device = candidates.tokens.shape[0], candidates.tokens.device
    tokens, candidate, mask = torch.empty((3, batch, k), dtype=torch.int64, device=device).unbind(0)
    level = Level(
        tokens,
        torch.empty((batch, k), dtype=torch.float32, device=device),
        candidate,
        mask,
        torch.empty(batch * k, dtype=torch.int64, device=device),
    )
    read = above or level  # at the root any tensors, which the kernel does not read
    _grow[(batch,)](
        children.log_probabilities,
        children.ids,
        children.target_ids,
        read.scores,
        read.candidate,
        read.mask,
        candidates.tokens,
        candidates.scores,
        candidates.parents,
        level.tokens,
        level.scores,
        level.candidate,
        level.mask,
        level.parent,
        candidates.tokens.shape[1],
        first,
        first_bit,
        HAS_MAP=children.target_ids is not None,
        ROOT=above is None,
        PARENTS=parents,
        K=k,
        CHILDREN=triton.next_power_of_2(parents * k),
        num_warps=1,
    )
    return level


@triton.jit
def _cut(
    candidate_token_ptr,
    candidate_score_ptr,
    candidate_parent_ptr,
    depth_ptr,
    slot_ptr,
    bonus_ptr,
    bonus_stride,
    token_ptr,
    parent_ptr,
    tree_depth_ptr,
    mask_ptr,
    num_candidates,
    depth_stride,
    W: tl.constexpr,
    W_TABLE: tl.constexpr,
    NODES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PART: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Write the tree of a request's root and its W - 1 best candidates to its slot in the tables [slots, W_TABLE].

    candidate_token_ptr, candidate_score_ptr, candidate_parent_ptr: [requests, num_candidates], fields of `Candidates`.
    depth_ptr: [requests, num_candidates] depths, or one row for all requests (depth_stride = 0).
    slot_ptr: [requests] int64.
    bonus_ptr: [slots] int64, bonus_stride apart: the roots' tokens.
    token_ptr, parent_ptr, tree_depth_ptr, mask_ptr: [slots, W_TABLE], fields of `Tree`, written.
    CANDIDATES: num_candidates padded.
    PART: nodes that are compared with all others at a time.
    MAX_DEPTH: upper bound of the depths.
    NODES: W padded.
    DOUBLINGS: steps of pointer doubling that reach from the deepest node to the root.
    SPANS: masks are spans of a numbering in preorder, with path lengths (`aerie.kernels.kv.tree_masks`).
    """
    b = tl.program_id(0)
    c = tl.arange(0, CANDIDATES)
    base = b * num_candidates
    score = tl.load(candidate_score_ptr + base + c, mask=c < num_candidates, other=float("-inf"))
    # among equal scores the one drafted first wins, so a node's parent is kept, too, and precedes it
    best = index_of(tl.topk(sort_key(score, c, CANDIDATES), NODES), CANDIDATES)
    node = tl.arange(0, NODES)
    inside = (node > 0) & (node < W)
    candidate = tl.where(inside, tl.gather(best, tl.maximum(node - 1, 0), 0), -2)  # node 0 is the root
    above = tl.load(candidate_parent_ptr + base + candidate, mask=inside, other=-1).to(tl.int32)
    parent = node * 0
    for start in range(0, NODES, PART):  # pairs of nodes are compared in registers
        other = start + tl.arange(0, PART)
        parent += tl.sum(tl.where(tl.gather(candidate, other, 0)[None, :] == above[:, None], other[None, :], 0), 1)
    depth = tl.load(depth_ptr + b * depth_stride + candidate, mask=inside, other=0)
    up = parent
    if SPANS:
        size, at, counts = tl.zeros([NODES], tl.int32), node, inside
        for _ in range(MAX_DEPTH):  # each node counts in its own subtree and in its ancestors'
            size += tl.histogram(at, NODES, mask=counts)
            at = tl.gather(parent, at, 0)
            counts = counts & (at > 0)
        number = inside.to(tl.int32)
        for start in range(0, NODES, PART):
            other = start + tl.arange(0, PART)
            earlier = (tl.gather(parent, other, 0)[None, :] == parent[:, None]) & (other[None, :] < node[:, None])
            earlier = earlier & inside[:, None] & (other > 0)[None, :]
            number += tl.sum(tl.where(earlier, tl.gather(size, other, 0)[None, :], 0), 1)
        for _ in tl.static_range(DOUBLINGS):
            number += tl.gather(number, up, 0)
            up = tl.gather(up, up, 0)
        end = tl.where(node == 0, W, number + size).to(tl.int64)
        mask = number.to(tl.int64) | (end << 16) | ((depth.to(tl.int64) + 1) << 32)
    else:
        mask = tl.full([NODES], 1, tl.int64) << node.to(tl.int64)
        for _ in tl.static_range(DOUBLINGS):  # the root is its own parent
            mask |= tl.gather(mask, up, 0)
            up = tl.gather(up, up, 0)
    slot = tl.load(slot_ptr + b)
    out = slot * W_TABLE + node
    root = node == 0
    token = tl.load(candidate_token_ptr + base + candidate, mask=inside, other=0)
    token = tl.where(root, tl.load(bonus_ptr + slot * bonus_stride), token)
    tl.store(token_ptr + out, token, mask=node < W)
    tl.store(parent_ptr + out, parent.to(tl.int64), mask=node < W)
    tl.store(tree_depth_ptr + out, depth, mask=node < W)
    tl.store(mask_ptr + out, mask, mask=node < W)


def write_best(trees: Tree, slots: Tensor, bonus: Tensor, candidates: Candidates, width: int) -> None:
    """Implement `aerie.kernels.tree.tree_growth.write_best`: write the root and the `width` - 1 best candidates of each
    request as its slot's tree."""
    fields = trees.fields
    batch, num_candidates = candidates.scores.shape
    assert num_candidates <= MAX_CUT_CANDIDATES
    nodes = triton.next_power_of_2(width)
    padded = max(16, nodes, triton.next_power_of_2(num_candidates))
    _cut[(batch,)](
        candidates.tokens,
        candidates.scores,
        candidates.parents,
        candidates.depths,
        slots,
        bonus,
        bonus.stride(0),
        *fields,
        num_candidates,
        candidates.depths.expand(batch, -1).stride(0),
        W=width,
        W_TABLE=fields[0].shape[1],
        NODES=nodes,
        CANDIDATES=padded,
        PART=min(nodes, 64),
        MAX_DEPTH=candidates.max_depth,
        DOUBLINGS=candidates.max_depth.bit_length(),
        SPANS=fields[0].shape[1] > MASK_BITS,
        num_warps=cut_warps(padded, nodes),
    )


def cut_warps(num_candidates: int, num_nodes: int = 1) -> int:
    """Return the warps of `_cut`: eight candidates a thread, so that small cuts need no barriers; eight warps for wide
    trees, whose nodes are compared in pairs (sm_90: no spills at 128 nodes, 24 bytes at 256)."""
    return max(1, min(8, max(num_candidates // 256, num_nodes // 16 if num_nodes > 64 else 1)))


# A node's sort key has its parent + 1 in the low bits, then the ranks of its path, then its level.
PARENT_BITS: tl.constexpr = tl.constexpr(tree_growth.PARENT_BITS)
NEXT_RANK: tl.constexpr = tl.constexpr(1 << tree_growth.PARENT_BITS)
LEVEL_AT: tl.constexpr = tl.constexpr(tree_growth.PARENT_BITS + tree_growth.MAX_PATH_BITS)


@triton.jit(do_not_specialize=["num_nodes"])
def _grow_block(
    score_ptr,
    id_ptr,
    map_ptr,
    clean_ptr,
    token_ptr,
    node_score_ptr,
    parent_ptr,
    depth_ptr,
    num_nodes,
    STEPS: tl.constexpr,
    K: tl.constexpr,
    RANK_BITS: tl.constexpr,
    STEPS_PADDED: tl.constexpr,
    K_PADDED: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Write a request's num_nodes best paths as candidates, best first.

    score_ptr, id_ptr: [requests, STEPS, K] log-probabilities, best first, and draft ids.
    map_ptr: target ids, or None.
    clean_ptr: [requests, STEPS, K] scratch: the scores, but minus infinity from a step's first NaN or infinity on.
    token_ptr, node_score_ptr, parent_ptr, depth_ptr: [requests, num_nodes], fields of `Candidates`, written. Until the
        end, depth_ptr holds each node's sort key: its level, the ranks of its path, its parent + 1.
    RANK_BITS: bits of a rank in a sort key.
    STEPS_PADDED, K_PADDED: STEPS and K, padded.
    PLACES: num_nodes + 1 padded.
    """
    b = tl.program_id(0)
    own = b * STEPS * K
    step, column = tl.arange(0, STEPS_PADDED), tl.arange(0, K_PADDED)
    cell = step[:, None] * K + column[None, :]
    inside = (step < STEPS)[:, None] & (column < K)[None, :]
    edge = tl.load(score_ptr + own + cell, mask=inside, other=0.0)
    broken = tl.cumsum((~(edge < float("inf"))).to(tl.int32), 1) > 0
    tl.store(clean_ptr + own + cell, tl.where(broken, float("-inf"), edge), mask=inside)
    tl.debug_barrier()

    nothing = 0x7FFFFFFFFFFFFFFF
    entry = tl.arange(0, PLACES)
    score = tl.where(entry == 0, tl.load(clean_ptr + own), float("-inf"))
    base = tl.zeros([PLACES], tl.float32)  # the parent's score
    order = tl.where(entry == 0, 0, nothing).to(tl.int64)
    node = num_nodes * 0
    while node < num_nodes:
        best = tl.max(score, 0)
        first = tl.min(tl.where(score == best, order, nothing), 0)
        here = order == first
        above = tl.sum(tl.where(here, base, 0.0), 0)
        level = (first >> LEVEL_AT).to(tl.int32)
        rank = (first >> PARENT_BITS).to(tl.int32) & ((1 << RANK_BITS) - 1)
        tl.store(node_score_ptr + b * num_nodes + node, best)
        tl.store(depth_ptr + b * num_nodes + node, first)
        node += 1
        has_sibling = rank + 1 < K
        sibling = tl.load(clean_ptr + own + level * K + rank + 1, mask=has_sibling, other=float("-inf"))
        has_child = level + 1 < STEPS
        below = tl.load(clean_ptr + own + (level + 1) * K, mask=has_child, other=float("-inf"))
        path = (first ^ (level.to(tl.int64) << LEVEL_AT)) >> PARENT_BITS
        child = ((level + 1).to(tl.int64) << LEVEL_AT) | (path << (RANK_BITS + PARENT_BITS)) | node
        score = tl.where(here, above + sibling, score)
        order = tl.where(here, tl.where(has_sibling, first + NEXT_RANK, nothing), order)
        new = entry == node
        score = tl.where(new, best + below, score)
        base = tl.where(new, best, base)
        order = tl.where(new & has_child, child, order)

    tl.debug_barrier()
    is_node = entry < num_nodes
    out = b * num_nodes + entry
    order = tl.load(depth_ptr + out, mask=is_node, other=0)
    level = order >> LEVEL_AT
    rank = (order >> PARENT_BITS) & ((1 << RANK_BITS) - 1)
    token = tl.load(id_ptr + own + level * K + rank, mask=is_node, other=0)
    if map_ptr is not None:
        token = tl.load(map_ptr + token, mask=is_node, other=0)
    tl.store(token_ptr + out, token, mask=is_node)
    tl.store(parent_ptr + out, (order & (NEXT_RANK - 1)) - 1, mask=is_node)
    tl.store(depth_ptr + out, level + 1, mask=is_node)


def grow_block(children: Children, width: int) -> Candidates:
    """Implement `aerie.kernels.tree.tree_growth.grow_block`: return the `width` - 1 best paths of a block draft as
    candidates, best first."""
    scores = children.log_probabilities
    (batch, steps, k), device = scores.shape, scores.device
    tokens, parents, depths = torch.empty((3, batch, width - 1), dtype=torch.int64, device=device).unbind(0)
    survivors = Candidates(tokens, scores.new_empty((batch, width - 1)), parents, depths, steps)
    _grow_block[(batch,)](
        scores,
        children.ids,
        children.target_ids,
        torch.empty_like(scores),
        tokens,
        survivors.scores,
        parents,
        depths,
        width - 1,
        STEPS=steps,
        K=k,
        RANK_BITS=tree_growth.rank_bits(k),
        STEPS_PADDED=triton.next_power_of_2(steps),
        K_PADDED=triton.next_power_of_2(k),
        PLACES=max(32, triton.next_power_of_2(width)),
        num_warps=1,
    )
    return survivors
