# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of `guides`: one launch per level. One program per request; for `mask`, per row and block of columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.drafting import guides as guides_module
from aerie.kernels.drafting.guides import MAX_EDGES, MAX_STATES, GuideTable
from aerie.kernels.tree.nodes import Children, Level

BLOCK = 4096  # logits per program
NOWHERE = tl.constexpr(guides_module.NOWHERE)


@triton.jit
def _guide_of(index_ptr, slot_ptr, request):
    return tl.load(index_ptr + tl.load(slot_ptr + request)).to(tl.int64)


@triton.jit
def _edge(edges_ptr, state, token, EDGES: tl.constexpr):
    """Return the target of a state's edge for a token; -2 if there is none."""
    edge = tl.arange(0, EDGES)
    origin = tl.load(edges_ptr + edge)
    by = tl.load(edges_ptr + EDGES + edge)
    target = tl.load(edges_ptr + 2 * EDGES + edge)
    return tl.max(tl.where((origin == state) & (by == token), target, -2), 0)


@triton.jit
def _after(states_ptr, edges_ptr, state, token, STATES: tl.constexpr, EDGES: tl.constexpr):
    """Return the state after a token."""
    by_edge = _edge(edges_ptr, state, token, EDGES)
    other = tl.load(states_ptr + STATES + tl.maximum(state, 0))
    return tl.where(state < 0, NOWHERE, tl.where(by_edge == -2, other, by_edge))


@triton.jit(do_not_specialize=["width"])
def _follow(
    block_ptr,
    block_stride,
    width,
    index_ptr,
    slot_ptr,
    above_ptr,
    parent_ptr,
    token_ptr,
    out_token_ptr,
    out_state_ptr,
    ROWS: tl.constexpr,
    BEGIN: tl.constexpr,
    LEVEL: tl.constexpr,
    FORCE: tl.constexpr,
    STATES: tl.constexpr,
    EDGES: tl.constexpr,
):
    """Write the guide's state after each of a request's ROWS tokens.

    block_ptr: [guides, block_stride] int32: width states at which nodes begin, then STATES forced tokens, STATES
        default targets and STATES masks, then EDGES edges.
    index_ptr: guide of each slot; negative: none.
    above_ptr: with BEGIN, nodes [rows]; with LEVEL, states that parent_ptr [rows] selects; else states [rows].
    FORCE: write a state's forced token, if it has one, in place of the row's.
    """
    b = tl.program_id(0).to(tl.int64)
    guide = _guide_of(index_ptr, slot_ptr, b)
    base = block_ptr + tl.maximum(guide, 0) * block_stride
    states = base + width
    edges = states + 3 * STATES
    for r in tl.static_range(ROWS):
        row = b * ROWS + r
        token = tl.load(token_ptr + row)
        if BEGIN:
            state = tl.load(base + tl.load(above_ptr + row))
            state = tl.where(guide < 0, NOWHERE, state)
        elif LEVEL:
            state = tl.load(above_ptr + tl.load(parent_ptr + row))
        else:
            state = tl.load(above_ptr + row)
        if FORCE:
            forced = tl.load(states + tl.maximum(state, 0))
            token = tl.where((state >= 0) & (forced >= 0), forced.to(tl.int64), token)
            tl.store(out_token_ptr + row, token)
        tl.store(out_state_ptr + row, _after(states, edges, state, token, STATES, EDGES))


def _launch(
    guides: GuideTable,
    slots: Tensor,
    above: Tensor,
    parents: Tensor | None,
    tokens: Tensor,
    begin: bool = False,
    force: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return tokens [B, R], or the forced ones, and the states [B, R] int32 after them.

    above: nodes [B] at which guides begin, or the states above.
    parents: [B * R] rows of `above`; None: the same rows.
    """
    rows = tokens.shape[1]
    states = torch.empty(tokens.shape, dtype=torch.int32, device=tokens.device)
    forced = torch.empty_like(tokens) if force else tokens
    _follow[(tokens.shape[0],)](
        guides.blocks,
        guides.blocks.stride(0),
        guides.width,
        guides.index,
        slots,
        above,
        above if parents is None else parents,
        tokens,
        forced,
        states,
        ROWS=rows,
        BEGIN=begin,
        LEVEL=parents is not None,
        FORCE=force,
        STATES=MAX_STATES,
        EDGES=MAX_EDGES,
        num_warps=2,
    )
    return forced, states


def begin(guides: GuideTable, slots: Tensor, nodes: Tensor, bonus: Tensor) -> Tensor:
    """Implement `aerie.kernels.drafting.guides.begin`: return the grammars' states [B, 1] int32 after the newest token
    `bonus` [B] of requests, which follows node `nodes` [B] of their verified trees."""
    return _launch(guides, slots, nodes.contiguous(), None, bonus.contiguous().unsqueeze(1), begin=True)[1]


def follow_chain(guides: GuideTable, slots: Tensor, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Implement `aerie.kernels.drafting.guides.follow_chain`: return the tokens of a chain's next level [B], forced
    where the grammar allows only one, and the states [B, 1] after them."""
    tokens, states = _launch(guides, slots, states, None, tokens.contiguous().unsqueeze(1), force=True)
    return tokens.squeeze(1), states


def follow_level(guides: GuideTable, slots: Tensor, states: Tensor, level: Level) -> Tensor:
    """Implement `aerie.kernels.drafting.guides.follow_level`: return the grammars' states [B, k] int32 after the nodes
    of a tree's level. states: [B, R] after the level above."""
    return _launch(guides, slots, states, level.parent, level.tokens.contiguous())[1]


@triton.jit(do_not_specialize=["width", "rows_per_request"])
def _mask(
    x_ptr,
    x_stride,
    size,
    block_ptr,
    block_stride,
    width,
    index_ptr,
    slot_ptr,
    state_ptr,
    rows_per_request,
    word_ptr,
    num_words,
    id_ptr,
    STATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set a block of a row's logits [size] to minus infinity where its guide's state forbids the token.

    block_ptr .. index_ptr: as in `_follow`. state_ptr: [rows].
    word_ptr: [masks, num_words] int32, a bit per token.
    id_ptr: target token ids of the columns.
    """
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(state_ptr + row)
    if state >= 0:
        guide = _guide_of(index_ptr, slot_ptr, row // rows_per_request)
        mask = tl.load(block_ptr + guide * block_stride + width + 2 * STATES + state).to(tl.int64)
        if mask >= 0:
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            inside = column < size
            token = tl.load(id_ptr + column, mask=inside, other=0)
            word = tl.load(word_ptr + mask * num_words + token // 32, mask=inside, other=0)
            forbidden = (word >> (token % 32).to(tl.int32) & 1) == 0
            nothing = tl.full([BLOCK], float("-inf"), tl.float32).to(x_ptr.dtype.element_ty)
            tl.store(x_ptr + row * x_stride + column, nothing, mask=inside & forbidden)


def mask(logits: Tensor, guides: GuideTable, words: Tensor, slots: Tensor, states: Tensor, ids: Tensor) -> None:
    """Implement `aerie.kernels.drafting.guides.mask`: set the logits of forbidden tokens to minus infinity, in states
    whose masks are known.

    words: masks of allowed tokens, one bit a token; `guides` has the mask of each state.
    slots: requests. ids: target id of each column.
    """
    rows, size = logits.shape
    _mask[(rows, triton.cdiv(size, BLOCK))](
        logits,
        logits.stride(0),
        size,
        guides.blocks,
        guides.blocks.stride(0),
        guides.width,
        guides.index,
        slots,
        states,
        states.shape[1],
        words,
        words.shape[1],
        ids,
        STATES=MAX_STATES,
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["width", "rows_per_request"])
def _children(
    block_ptr,
    block_stride,
    width,
    index_ptr,
    slot_ptr,
    state_ptr,
    rows_per_request,
    id_ptr,
    score_ptr,
    map_ptr,
    out_id_ptr,
    out_score_ptr,
    UNLIKELY: tl.constexpr,
    HAS_MAP: tl.constexpr,
    K: tl.constexpr,
    STATES: tl.constexpr,
    EDGES: tl.constexpr,
):
    """Write the K children of a row, with the token that its guide's state forces before all others.

    block_ptr .. index_ptr: as in `_follow`. state_ptr: [rows].
    id_ptr, score_ptr: [rows, K] draft ids and log-probabilities.
    map_ptr: target ids, with HAS_MAP.
    out_id_ptr, out_score_ptr: [rows, K], written.
    UNLIKELY: added to the score of other tokens without an edge.
    """
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(state_ptr + row)
    guide = tl.maximum(_guide_of(index_ptr, slot_ptr, row // rows_per_request), 0)
    states = block_ptr + guide * block_stride + width
    forced = tl.load(states + tl.maximum(state, 0)).to(tl.int64)
    is_forced = (state >= 0) & (forced >= 0)
    # the forced token first, then the others, without it, or without the last

    column = tl.where(is_forced, 1, 0)
    tl.store(out_id_ptr + row * K, forced, mask=is_forced)
    tl.store(out_score_ptr + row * K, 0.0, mask=is_forced)
    for i in tl.static_range(K):
        token = tl.load(id_ptr + row * K + i)
        if HAS_MAP:
            token = tl.load(map_ptr + token)
        score = tl.load(score_ptr + row * K + i)
        known = _edge(states + 3 * STATES, state, token, EDGES) != -2
        score = tl.where(is_forced & (known == 0), score + UNLIKELY, score)
        stays = (is_forced == 0) | (token != forced)
        tl.store(out_id_ptr + row * K + column, token, mask=stays & (column < K))
        tl.store(out_score_ptr + row * K + column, score, mask=stays & (column < K))
        column += tl.where(stays, 1, 0)


def children(guides: GuideTable, slots: Tensor, states: Tensor, candidates: Children, unlikely: float) -> Children:
    """Implement `aerie.kernels.drafting.guides.children`: return proposals in which a forced token is the first of its
    row, with log-probability 0.

    slots: requests. states: the grammar's state after each row's node.
    candidates: proposals after each row's node.
    unlikely: added to the log-probability of other tokens without an edge, if a token is forced.
    """
    ids, scores = torch.empty_like(candidates.ids), torch.empty_like(candidates.log_probabilities)
    _children[(ids.shape[0],)](
        guides.blocks,
        guides.blocks.stride(0),
        guides.width,
        guides.index,
        slots,
        states,
        states.shape[1],
        candidates.ids,
        candidates.log_probabilities,
        candidates.target_ids,
        ids,
        scores,
        UNLIKELY=unlikely,
        HAS_MAP=candidates.target_ids is not None,
        K=ids.shape[1],
        STATES=MAX_STATES,
        EDGES=MAX_EDGES,
        num_warps=2,
    )
    return Children(scores, ids, None)
