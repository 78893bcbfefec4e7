"""Draft guides: a small automaton on the device for each request with a grammar, which proposes draft tokens.

Each node of a verified tree has a state. The bonus token and each drafted token lead to the next state, which limits
the draft's scores and proposals. State `NOWHERE` drafts freely; slots without a guide are always in it. A guide never
affects which token is chosen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.contracts import check_slots
from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.tree.nodes import Children, Level

NOWHERE = -1  # marks no guide, state, token or mask
MAX_STATES = 64  # maximum states of a guide
MAX_EDGES = 256  # powers of two, for the kernels
NO_ORIGIN = -2  # origin of an unused edge: neither a state nor `NOWHERE`
PARTS = [MAX_STATES] * 3 + [MAX_EDGES] * 3  # int32 numbers of each part of a guide but the first, `nodes`


@dataclass(frozen=True)
class GuideTable:
    """Guides of a step's requests, packed in the order of the step. All tensors are int32.

    index: [num_slots + 1], guide of each slot, or `NOWHERE`.
    blocks: [num_slots, block_size(width)], one row per guide; the following tensors are views of it.
    nodes: [num_slots, width], state of each node of the tree.
    forced: [num_slots, MAX_STATES], token to propose in a state; other proposals need an edge.
    other: [num_slots, MAX_STATES], state after a token without an edge.
    rows: [num_slots, MAX_STATES], index of the mask with the allowed tokens of a state.
    origins, tokens, targets: [num_slots, MAX_EDGES], origin state, token and target state of each edge; at most one
        edge per state and token.
    """

    index: Tensor
    blocks: Tensor
    nodes: Tensor
    forced: Tensor
    other: Tensor
    rows: Tensor
    origins: Tensor
    tokens: Tensor
    targets: Tensor

    @staticmethod
    def of(index: Tensor, blocks: Tensor) -> "GuideTable":
        return GuideTable(index, blocks, *torch.split(blocks, [width_of(blocks), *PARTS], dim=1))

    @property
    def width(self) -> int:
        """Number of nodes of a tree."""
        return width_of(self.blocks)


def block_size(width: int) -> int:
    """Return the size of one guide, in int32 numbers, for trees of `width` nodes."""
    return width + sum(PARTS)


def width_of(blocks: Tensor) -> int:
    """Return the number of nodes of a tree, from blocks [n, block_size]."""
    return blocks.shape[1] - sum(PARTS)


def _check_guides(guides: GuideTable, slots: Tensor) -> None:
    assert guides.blocks.stride(1) == 1 and guides.index.is_contiguous()
    check_slots(slots)


def _check_states(guides: GuideTable, slots: Tensor, states: Tensor) -> None:
    _check_guides(guides, slots)
    assert states.shape[:1] == slots.shape and states.dtype == torch.int32 and states.is_contiguous()


def _check_begin(guides: GuideTable, slots: Tensor, nodes: Tensor, bonus: Tensor) -> None:
    _check_guides(guides, slots)
    assert nodes.shape == bonus.shape == slots.shape and nodes.dtype == bonus.dtype == torch.int64


def _check_chain(guides: GuideTable, slots: Tensor, states: Tensor, tokens: Tensor) -> None:
    _check_states(guides, slots, states)
    assert tokens.shape == slots.shape and tokens.dtype == torch.int64


def _check_level(guides: GuideTable, slots: Tensor, states: Tensor, level: Level) -> None:
    _check_states(guides, slots, states)
    assert level.tokens.is_contiguous() and level.parent.is_contiguous()


def _check_mask(logits: Tensor, guides: GuideTable, words: Tensor, slots: Tensor, states: Tensor, ids: Tensor) -> None:
    _check_states(guides, slots, states)
    assert logits.shape == (states.numel(), ids.shape[0]) and logits.stride(1) == 1
    assert words.dtype == torch.int32 and words.is_contiguous() and ids.dtype == torch.int64 and ids.is_contiguous()


def _check_children(guides: GuideTable, slots: Tensor, states: Tensor, candidates: Children, unlikely: float) -> None:
    _check_states(guides, slots, states)
    assert (
        candidates.ids.shape[0] == states.numel()
        and candidates.ids.is_contiguous()
        and candidates.log_probabilities.is_contiguous()
    )


@operation(Implementation("triton", "aerie.kernels.drafting.guides_triton:begin", on_gpu), contract=_check_begin)
def begin(guides: GuideTable, slots: Tensor, nodes: Tensor, bonus: Tensor) -> Tensor:
    """Return the states of requests after their newest token.

    slots  [B] int64, contiguous
    nodes  [B] int64 node of each verified tree after which the newest token was chosen
    bonus  [B] int64 that token
    ->     [B, 1] int32
    """
    guide = guides.index[slots].long()
    states = guides.nodes[guide.clamp_min(0), nodes]
    states = torch.where(guide >= 0, states, NOWHERE).unsqueeze(1)
    return follow(guides, slots, states, bonus.unsqueeze(1))


@operation(Implementation("triton", "aerie.kernels.drafting.guides_triton:follow_chain", on_gpu), contract=_check_chain)
def follow_chain(guides: GuideTable, slots: Tensor, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens of a chain's next level, forced where the grammar allows only one, and the states after them.

    slots   [B] int64, contiguous
    states  [B, 1] int32, contiguous
    tokens  [B] int64
    ->      [B] int64; [B, 1] int32
    """
    chosen = forced_or(guides, slots, states, tokens.unsqueeze(1))
    return chosen.squeeze(1), follow(guides, slots, states, chosen)


@operation(Implementation("triton", "aerie.kernels.drafting.guides_triton:follow_level", on_gpu), contract=_check_level)
def follow_level(guides: GuideTable, slots: Tensor, states: Tensor, level: Level) -> Tensor:
    """Return the states after the nodes of a tree's level.

    slots   [B] int64, contiguous
    states  [B, R] int32, contiguous: after the nodes of the level above
    level   k nodes per request
    ->      [B, k] int32
    """
    above = states.flatten()[level.parent].view(level.tokens.shape)
    return follow(guides, slots, above, level.tokens)


@operation(Implementation("triton", "aerie.kernels.drafting.guides_triton:mask", on_gpu), contract=_check_mask)
def mask(logits: Tensor, guides: GuideTable, words: Tensor, slots: Tensor, states: Tensor, ids: Tensor) -> None:
    """Set the logits of forbidden tokens to minus infinity, in states whose masks are known.

    logits  [B * R, n], last stride 1, written
    words   [masks, ceil(vocab_size / 32)] int32, contiguous; bit t % 32 of word t // 32 allows token t
    slots   [B] int64, contiguous
    states  [B, R] int32, contiguous
    ids     [n] int64, contiguous: target id of each column
    """
    guide = guides.index[slots].long().clamp_min(0)
    rows = guides.rows[guide].gather(1, states.long().clamp_min(0))
    rows = torch.where(states < 0, NOWHERE, rows).flatten().long()
    allowed = (words[rows.clamp_min(0)][:, ids // 32] >> (ids % 32) & 1).bool()
    logits.masked_fill_(~allowed & (rows >= 0).unsqueeze(1), float("-inf"))


@operation(Implementation("triton", "aerie.kernels.drafting.guides_triton:children", on_gpu), contract=_check_children)
def children(guides: GuideTable, slots: Tensor, states: Tensor, candidates: Children, unlikely: float) -> Children:
    """Return proposals in which a forced token is the first of its row, with log-probability 0.

    slots       [B] int64, contiguous
    states      [B, R] int32, contiguous
    candidates  [B * R, k], contiguous
    unlikely    added to the log-probability of a row's other tokens that have no edge, if one is forced
    ->          [B * R, k], target ids
    """
    batch = states.shape[0]
    ids = candidates.ids if candidates.target_ids is None else candidates.target_ids[candidates.ids]
    forced = _forced(guides, slots, states).view(-1, 1)
    known = _hits(guides, slots, states.repeat_interleave(ids.shape[1], 1), ids.view(batch, -1)).any(2).view(ids.shape)
    scores = torch.where(known, candidates.log_probabilities, candidates.log_probabilities + unlikely)
    # the forced token, then the others in order; the last is dropped unless the forced token was among them
    others = torch.cat((forced, ids), dim=1)
    scores = torch.cat((torch.zeros_like(forced, dtype=scores.dtype), scores), dim=1)
    again = others == forced
    again[:, 0] = False
    again[:, -1] |= ~again.any(1)
    order = again.int().sort(dim=1, stable=True).indices[:, :-1]
    is_forced = forced >= 0
    return Children(
        torch.where(is_forced, scores.gather(1, order), candidates.log_probabilities),
        torch.where(is_forced, others.gather(1, order), ids),
        None,
    )


def follow(guides: GuideTable, slots: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
    """Return the states after tokens [B, R] int64 in states [B, R] int32: [B, R] int32."""
    guide, hits = guides.index[slots].long().clamp_min(0), _hits(guides, slots, states, tokens)
    by_edge = guides.targets[guide].gather(1, hits.int().argmax(2))
    other = guides.other[guide].gather(1, states.long().clamp_min(0))
    return torch.where(states < 0, NOWHERE, torch.where(hits.any(2), by_edge, other))


def _hits(guides: GuideTable, slots: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
    """Return [B, R, MAX_EDGES] bool: the edges that leave states [B, R] with tokens [B, R]."""
    guide = guides.index[slots].long().clamp_min(0)
    origins, edge_tokens = guides.origins[guide].unsqueeze(1), guides.tokens[guide].unsqueeze(1)
    return (origins == states.unsqueeze(2)) & (edge_tokens == tokens.unsqueeze(2))


def forced_or(guides: GuideTable, slots: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
    """Return [B, R] int64: the token that a state forces, or else that of tokens [B, R]."""
    forced = _forced(guides, slots, states)
    return torch.where(forced >= 0, forced, tokens)


def _forced(guides: GuideTable, slots: Tensor, states: Tensor) -> Tensor:
    guide = guides.index[slots].long().clamp_min(0)
    forced = guides.forced[guide].gather(1, states.long().clamp_min(0))
    return torch.where(states < 0, NOWHERE, forced).long()
