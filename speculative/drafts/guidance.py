"""Drafting under grammars: where the drafts of a step stand in their requests' guides
(`workers.structured_output.guide_table`). Used by `speculative.drafts.drafter`, in steps in which a request has a
grammar."""

from torch import Tensor

from speculative.ops import guides
from speculative.tree.nodes import Children, Level
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
        self._states = guides.begin(self._guides, slots, nodes, bonus)

    def mask(self, logits: Tensor, ids: Tensor) -> None:
        """Set tokens that may not come to minus infinity, in place: logits [B * R, n] of tokens ids [n] int64, R rows
        of each request."""
        guides.mask(logits, self._guides, self._words, self._slots, self._states, ids)

    def follow(self, tokens: Tensor) -> Tensor:
        """Return tokens [B] int64, drafted as chains, or the forced ones in their place; go on after them."""
        tokens, self._states = guides.follow_chain(self._guides, self._slots, self._states, tokens)
        return tokens

    def children(self, found: Children) -> Children:
        """Return proposals in which a forced token is the first of its row, and certain."""
        return guides.children(self._guides, self._slots, self._states, found, UNLIKELY)

    def grown(self, level: Level) -> None:
        """Go on after a level of trees."""
        self._states = guides.follow_level(self._guides, self._slots, self._states, level)
