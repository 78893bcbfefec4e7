# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel of `best_first.grow_block`: one launch, one program of one warp a request.

It expands one node after another, as a heap does. The nodes that may come next lie in registers: of each expanded node
its first child, and of each child but the last its next sibling. So there is one more of them than expanded nodes.
"""

import torch
import triton
import triton.language as tl

from aerie.kernels.tree import best_first
from aerie.kernels.tree.nodes import Candidates, Children

PARENT_BITS: tl.constexpr = tl.constexpr(best_first.PARENT_BITS)
NEXT_RANK: tl.constexpr = tl.constexpr(1 << best_first.PARENT_BITS)
LEVEL_AT: tl.constexpr = tl.constexpr(best_first.PARENT_BITS + best_first.MAX_PATH_BITS)


@triton.jit(do_not_specialize=["num_nodes"])
def _grow_block(
    score_ptr,
    id_ptr,
    map_ptr,
    clean_ptr,
    token_ptr,
    kept_score_ptr,
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
    place = tl.arange(0, PLACES)
    score = tl.where(place == 0, tl.load(clean_ptr + own), float("-inf"))
    base = tl.zeros([PLACES], tl.float32)  # the parent's score
    order = tl.where(place == 0, 0, nothing).to(tl.int64)
    node = num_nodes * 0
    while node < num_nodes:
        best = tl.max(score, 0)
        first = tl.min(tl.where(score == best, order, nothing), 0)
        here = order == first
        above = tl.sum(tl.where(here, base, 0.0), 0)
        level = (first >> LEVEL_AT).to(tl.int32)
        rank = (first >> PARENT_BITS).to(tl.int32) & ((1 << RANK_BITS) - 1)
        tl.store(kept_score_ptr + b * num_nodes + node, best)
        tl.store(depth_ptr + b * num_nodes + node, first)
        node += 1
        has_sibling = rank + 1 < K
        beside = tl.load(clean_ptr + own + level * K + rank + 1, mask=has_sibling, other=float("-inf"))
        has_child = level + 1 < STEPS
        below = tl.load(clean_ptr + own + (level + 1) * K, mask=has_child, other=float("-inf"))
        path = (first ^ (level.to(tl.int64) << LEVEL_AT)) >> PARENT_BITS
        child = ((level + 1).to(tl.int64) << LEVEL_AT) | (path << (RANK_BITS + PARENT_BITS)) | node
        score = tl.where(here, above + beside, score)
        order = tl.where(here, tl.where(has_sibling, first + NEXT_RANK, nothing), order)
        new = place == node
        score = tl.where(new, best + below, score)
        base = tl.where(new, best, base)
        order = tl.where(new & has_child, child, order)

    tl.debug_barrier()
    is_node = place < num_nodes
    out = b * num_nodes + place
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
    """`aerie.kernels.tree.best_first.grow_block`."""
    scores = children.log_probabilities
    (batch, steps, k), device = scores.shape, scores.device
    tokens, parents, depths = torch.empty((3, batch, width - 1), dtype=torch.int64, device=device).unbind(0)
    kept = Candidates(tokens, scores.new_empty((batch, width - 1)), parents, depths, steps)
    _grow_block[(batch,)](
        scores,
        children.ids,
        children.target_ids,
        torch.empty_like(scores),
        tokens,
        kept.scores,
        parents,
        depths,
        width - 1,
        STEPS=steps,
        K=k,
        RANK_BITS=best_first.rank_bits(k),
        STEPS_PADDED=triton.next_power_of_2(steps),
        K_PADDED=triton.next_power_of_2(k),
        PLACES=max(32, triton.next_power_of_2(width)),
        num_warps=1,
    )
    return kept
