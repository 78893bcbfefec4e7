"""Drafts under grammars: tracks each request's state in its draft guide
(`aerie.kernels.drafting.guides`). Used by `aerie.speculative.drafts.drafter` if a request has a
grammar."""

from torch import Tensor

from aerie.kernels.drafting import guides
from aerie.kernels.tree.nodes import Children, Level
from aerie.workers.structured_output.mask_table import MaskTable

UNLIKELY = -1024.0  # added to the log-probability of tokens that would end acceptance


class Guidance:
    """The states of a batch's draft guides.

    masks: masks and guides of the step, on the device.
    slots: [B] int64 slots whose trees are drafted.
    nodes: [B] int64 node of each verified tree after which the newest token was chosen.
    bonus: [B] int64 the newest tokens.
    """

    def __init__(self, masks: MaskTable, slots: Tensor, nodes: Tensor, bonus: Tensor) -> None:
        assert masks.guides is not None, "a draft in an engine whose masks have no guides"
        self._guides, self._words, self._slots = masks.guides, masks.words, slots
        self._states = guides.begin(self._guides, slots, nodes, bonus)

    def mask(self, logits: Tensor, ids: Tensor) -> None:
        """Set forbidden tokens to minus infinity, in place.

        logits: [B * R, n], R rows per request.
        ids: [n] int64 token ids of the columns.
        """
        guides.mask(logits, self._guides, self._words, self._slots, self._states, ids)

    def follow(self, tokens: Tensor) -> Tensor:
        """Return the next tokens of chains, [B] int64: the forced token if there is one, else that of `tokens`. Advance
        the states."""
        tokens, self._states = guides.follow_chain(self._guides, self._slots, self._states, tokens)
        return tokens

    def children(self, candidates: Children) -> Children:
        """Make a forced token the first proposal of its row, with probability 1."""
        return guides.children(self._guides, self._slots, self._states, candidates, UNLIKELY)

    def grown(self, level: Level) -> None:
        """Advance the states by one level of the trees."""
        self._states = guides.follow_level(self._guides, self._slots, self._states, level)
