"""Drafting under grammars: where the drafts of a step stand in their requests' guides
(`workers.structured_output.guide_table`), and what that does to the draft's scores and tokens. Used by
`speculative.drafter`, in steps of which a request has a grammar; kernels do the same on GPUs."""

import torch
from torch import Tensor

from speculative.tree import Children, Level
from workers.structured_output.guide_table import NOWHERE, GuideTable
from workers.structured_output.mask_table import MaskTable

UNLIKELY = -1024.0  # added to the log-probability of a token that is not worth proposing


class Guidance:
    """masks: of the step, on the device.
    slots: [B] int64, whose trees are drafted.
    nodes: [B] int64, the node of each one's verified tree after which its newest token was chosen.
    bonus: [B] int64, that token.
    """

    def __init__(self, masks: MaskTable, slots: Tensor, nodes: Tensor, bonus: Tensor) -> None:
        assert masks.guides is not None, "a draft in an engine whose masks have no guides"
        self._guides, self._words, self._slots = masks.guides, masks.words, slots
        if slots.is_cuda:
            from speculative.kernels import guidance as kernel

            self._states = kernel.begin(self._guides, slots, nodes, bonus)
        else:
            self._states = begin(self._guides, slots, nodes, bonus)

    def mask(self, logits: Tensor, ids: Tensor) -> None:
        """Tokens that may not come to minus infinity, in place: logits [B * R, n] of tokens ids [n] int64, R rows of
        each request."""
        if logits.is_cuda:
            from speculative.kernels import guidance as kernel

            kernel.mask(logits, self._guides, self._words, self._slots, self._states, ids)
        else:
            mask(logits, self._guides, self._words, self._slots, self._states, ids)

    def follow(self, tokens: Tensor) -> Tensor:
        """tokens [B] int64, drafted as chains, or in their place those that are forced; goes on behind them."""
        if tokens.is_cuda:
            from speculative.kernels import guidance as kernel

            tokens, self._states = kernel.follow_chain(self._guides, self._slots, self._states, tokens)
            return tokens
        tokens = forced_or(self._guides, self._slots, self._states, tokens.unsqueeze(1))
        self._states = follow(self._guides, self._slots, self._states, tokens)
        return tokens.squeeze(1)

    def children(self, found: Children) -> Children:
        """Proposals with those that are forced as the first of their rows, and certain."""
        if found.ids.is_cuda:
            from speculative.kernels import guidance as kernel

            return kernel.children(self._guides, self._slots, self._states, found, UNLIKELY)
        return children(self._guides, self._slots, self._states, found)

    def grown(self, level: Level) -> None:
        """Go on behind a level of trees."""
        if level.tokens.is_cuda:
            from speculative.kernels import guidance as kernel

            self._states = kernel.follow_level(self._guides, self._slots, self._states, level)
            return
        states = self._states.flatten()[level.parent].view(level.tokens.shape)
        self._states = follow(self._guides, self._slots, states, level.tokens)


def begin(guides: GuideTable, slots: Tensor, nodes: Tensor, bonus: Tensor) -> Tensor:
    """[B, 1] int32: the states of requests slots [B] int64, behind a node and the token bonus [B] int64 after it."""
    guide = guides.index[slots].long()
    states = guides.nodes[guide.clamp_min(0), nodes]
    states = torch.where(guide >= 0, states, NOWHERE).unsqueeze(1)
    return follow(guides, slots, states, bonus.unsqueeze(1))


def follow(guides: GuideTable, slots: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
    """[B, R] int32: the states after tokens [B, R] int64 in states [B, R] int32."""
    guide, hits = guides.index[slots].long().clamp_min(0), _hits(guides, slots, states, tokens)
    by_edge = guides.targets[guide].gather(1, hits.int().argmax(2))
    other = guides.other[guide].gather(1, states.long().clamp_min(0))
    return torch.where(states < 0, NOWHERE, torch.where(hits.any(2), by_edge, other))


def _hits(guides: GuideTable, slots: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
    """[B, R, MAX_EDGES] bool: which edge leads on from states [B, R] with tokens [B, R]."""
    guide = guides.index[slots].long().clamp_min(0)
    origins, edge_tokens = guides.origins[guide].unsqueeze(1), guides.tokens[guide].unsqueeze(1)
    return (origins == states.unsqueeze(2)) & (edge_tokens == tokens.unsqueeze(2))


def forced_or(guides: GuideTable, slots: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
    """[B, R] int64: tokens [B, R], or those that states [B, R] force."""
    forced = _forced(guides, slots, states)
    return torch.where(forced >= 0, forced, tokens)


def _forced(guides: GuideTable, slots: Tensor, states: Tensor) -> Tensor:
    guide = guides.index[slots].long().clamp_min(0)
    forced = guides.forced[guide].gather(1, states.long().clamp_min(0))
    return torch.where(states < 0, NOWHERE, forced).long()


def mask(logits: Tensor, guides: GuideTable, words: Tensor, slots: Tensor, states: Tensor, ids: Tensor) -> None:
    """Reference of `Guidance.mask`."""
    guide = guides.index[slots].long().clamp_min(0)
    rows = guides.rows[guide].gather(1, states.long().clamp_min(0))
    rows = torch.where(states < 0, NOWHERE, rows).flatten().long()
    allowed = (words[rows.clamp_min(0)][:, ids // 32] >> (ids % 32) & 1).bool()
    logits.masked_fill_(~allowed & (rows >= 0).unsqueeze(1), float("-inf"))


def children(guides: GuideTable, slots: Tensor, states: Tensor, found: Children) -> Children:
    """Reference of `Guidance.children`."""
    batch = states.shape[0]
    ids = found.ids if found.target_ids is None else found.target_ids[found.ids]
    forced = _forced(guides, slots, states).view(-1, 1)
    known = _hits(guides, slots, states.repeat_interleave(ids.shape[1], 1), ids.view(batch, -1)).any(2).view(ids.shape)
    scores = torch.where(known, found.log_probabilities, found.log_probabilities + UNLIKELY)
    # the forced token first, the others in their order, without it, or without the last
    others = torch.cat((forced, ids), dim=1)
    scores = torch.cat((torch.zeros_like(forced, dtype=scores.dtype), scores), dim=1)
    again = others == forced
    again[:, 0] = False
    again[:, -1] |= ~again.any(1)
    order = again.int().sort(dim=1, stable=True).indices[:, :-1]
    is_forced = forced >= 0
    return Children(
        torch.where(is_forced, scores.gather(1, order), found.log_probabilities),
        torch.where(is_forced, others.gather(1, order), ids),
        None,
    )
