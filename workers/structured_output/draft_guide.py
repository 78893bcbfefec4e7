"""Computes what drafts should propose under a grammar, while the masks of a tree are filled.

The next tree is drafted on the device right after acceptance, before the host knows which tokens were accepted. So for
every node at which acceptance may end, the host writes a guide in advance (`workers.structured_output.guide_table`):
which tokens the grammar allows next. A guide's states are of two kinds. In a text that the grammar forces, the next
token is forced, whatever the tokens so far. Elsewhere, as in a string or a number, a mask gives the allowed tokens.
From there, edges lead to forced texts by the tokens that end the string or number: by those after which this grammar
forced a text before, or by all if they are few.

A guide never decides which token is chosen: if it is wrong or incomplete, fewer drafts are accepted. Called by
`workers.structured_output.guest`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from workers.structured_output.guide_table import NOWHERE, GuideBlock
from workers.structured_output.token_texts import TextStates, TokenTexts

if TYPE_CHECKING:
    from workers.structured_output.matcher import Matcher

FEW_TOKENS = 6  # so many are all tried
MAX_ENDINGS = 6  # tokens that are remembered because a text was demanded after them
_MAX_SPACED_BYTES = 48  # of texts whose whitespace is open; more is found when these are accepted
_WHITESPACE = b" \t\n\r"
_MAX_LEVEL = 2  # open places and texts that are followed one after the other


class Endings:
    """Tokens after which a grammar demanded a text, the newest last.

    is_spaced: whether a space stands after colons and commas, where the grammar leaves that open.
    """

    def __init__(self) -> None:
        self.is_spaced = True
        self._tokens: dict[int, None] = {}

    def add(self, token: int) -> None:
        self._tokens.pop(token, None)
        self._tokens[token] = None
        if len(self._tokens) > MAX_ENDINGS:
            del self._tokens[next(iter(self._tokens))]

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._tokens))


class StepClosedError(Exception):
    """The step for which masks are filled goes on without this request."""


@dataclass
class MaskRows:
    """The masks of a tree, before they are the step's.

    words: [rows, w] int32, of this walk alone: the masks of the tree's nodes, then those of positions after the tree.
    array: the same memory.
    first: of the step's masks that of the root; the others follow.
    end: rows in use; up to `limit` may be.
    scratch: [1, w] int32, of this walk alone.
    check: raises StepClosedError.
    """

    words: Tensor
    array: npt.NDArray[np.int32]
    first: int
    end: int
    limit: int
    scratch: Tensor
    check: Callable[[], None] = lambda: None

    def fill(self, matcher: "Matcher", row: int) -> None:
        """The mask where the matcher stands."""
        self.check()
        matcher.fill(self.words, row)


class _Demanded(NamedTuple):
    """A text that is demanded, and its states in the guide."""

    text: bytes
    states: TextStates
    base: int

    def at(self, offset: int) -> int:
        state = self.states.by_offset.get(offset, NOWHERE)
        return NOWHERE if state == NOWHERE else self.base + state


class _Place(NamedTuple):
    """Where a node of the tree stands: `offset` bytes into a demanded text, or in an open state, whose mask is in
    `row`."""

    state: int
    demanded: _Demanded | None = None
    offset: int = 0
    row: int = NOWHERE


@dataclass
class TreeWalk:
    """Fills the masks of one tree, and writes its guide. What it raises leaves tries in the matcher.

    any_whitespace: whether the grammar allows whitespace between the parts of a text, as much as the answer likes.
    ended: the newest token, if it stood in an open place, which it may have ended.
    num_guided: nodes that have a state in the guide, the first ones of the tree, which are the likely ones.
    is_demanded: by node, whether what follows it is a text that the grammar demands; of nodes that it allows.
    """

    matcher: "Matcher"
    texts: TokenTexts
    endings: Endings
    stop_token_ids: tuple[int, ...]
    rows: MaskRows
    guide: GuideBlock
    num_guided: int
    any_whitespace: bool = False
    ended: int | None = None
    is_demanded: dict[int, bool] = field(default_factory=dict)
    _other: int = NOWHERE  # row of the mask that was compared with last
    _other_mask: bytes = b""

    def run(self, tokens: Sequence[int], children: Sequence[Sequence[int]]) -> None:
        """tokens: of the nodes. children: of each node."""
        self._visit(0, tokens, children, None)

    def _visit(self, node: int, tokens: Sequence[int], children: Sequence[Sequence[int]], above: _Place | None) -> None:
        if self.matcher.is_terminated():
            self.rows.array[node] = -1
            return
        self.rows.fill(self.matcher, node)
        place = None
        if node < self.num_guided:
            place = self._place(node, tokens[node], above)
            self.guide.set_node(node, place.state)
            self.is_demanded[node] = place.demanded is not None
            if node == 0 and self.ended is not None and place.demanded is not None:
                self.endings.add(self.ended)
        for child in children[node]:
            if self.matcher.accept_token(tokens[child]):
                self._visit(child, tokens, children, place)
                self.matcher.rollback(1)

    def _place(self, row: int, token: int, above: _Place | None) -> _Place:
        """Of the node after a token. row: its mask."""
        if above is not None and above.demanded is not None:
            demanded, text = above.demanded, self.texts[token]
            offset = above.offset + len(text)
            if offset < len(demanded.text) and demanded.text.startswith(text, above.offset):
                state = demanded.at(offset)
                if state != NOWHERE:
                    return _Place(state, demanded, offset)
        elif above is not None and above.row != NOWHERE and self._masks_are_equal(row, above.row):
            return above
        return self._here(row, 0)

    def _masks_are_equal(self, row: int, other: int) -> bool:
        if other != self._other:
            self._other, self._other_mask = other, self.rows.array[other].tobytes()
        mask: bytes = self.rows.array[row].tobytes()
        return mask == self._other_mask  # several times as quick as numpy's comparison

    def _here(self, row: int, level: int) -> _Place:
        """Where the matcher stands. row: the mask, if it is filled."""
        text = self._text()
        if text:
            return self._demand(text, level)
        few = self._few(row) if row != NOWHERE else None
        if self.matcher.is_completed() and (row == NOWHERE or few is not None and set(few) <= set(self.stop_token_ids)):
            return _Place(self.guide.add_state(forced=self.stop_token_ids[0]))
        state = self._open(row, few, level)
        return _Place(state, row=NOWHERE if state == NOWHERE else row)

    def _text(self) -> bytes:
        """What must come; where whitespace may stand in it, as this grammar's answers have it."""
        if not self.any_whitespace:
            return self.matcher.jump()
        text, taken = b"", 0
        while len(text) < _MAX_SPACED_BYTES:
            part = self.matcher.jump() or self._behind_whitespace(text)
            if not part or not self.matcher.accept_string(part):
                break
            text, taken = text + part, taken + 1
        if taken:
            self.matcher.rollback(taken)
        return text

    def _behind_whitespace(self, text: bytes) -> bytes:
        """What goes on after a text where whitespace may come next, or one other byte; b"" where more is open."""
        scratch = self.rows.scratch
        if self.matcher.is_terminated():
            return b""
        self.matcher.fill(scratch)
        allowed = self.texts.bytes_allowed(scratch[0].numpy())
        others = [byte for byte in allowed if byte not in _WHITESPACE]
        if len(others) == len(allowed):
            return b""
        is_spaced = self.endings.is_spaced and text[-1:] in (b":", b",") and ord(" ") in allowed
        return (b" " if is_spaced else b"") + (bytes(others) if len(others) == 1 else b"")

    def _demand(self, text: bytes, level: int) -> _Place:
        states = self.texts.states(text)
        if len(states.forced) > self.guide.room:
            return _Place(NOWHERE)
        demanded = _Demanded(text, states, self.guide.add_forced_states(states.forced))
        end = self._after_text(text, level) if level < _MAX_LEVEL else NOWHERE
        targets = states.targets + demanded.base
        targets[states.last] = end
        self.guide.add_edges(states.origins + demanded.base, states.tokens, targets)
        return _Place(demanded.base, demanded)

    def _after_text(self, text: bytes, level: int) -> int:
        """The state after a demanded text."""
        if not self.matcher.accept_string(text):
            return NOWHERE
        row = NOWHERE
        if self.rows.end < self.rows.limit and not self.matcher.is_terminated():
            row, self.rows.end = self.rows.end, self.rows.end + 1
            self.rows.fill(self.matcher, row)
        state = self._here(row, level + 1).state
        self.matcher.rollback(1)
        return state

    def _open(self, row: int, few: list[int] | None, level: int) -> int:
        """The state of a place where several tokens may come. few: all of them, if they are."""
        mask = NOWHERE if row == NOWHERE else self.rows.first + row
        state = self.guide.add_state(row=mask, stays=few is None)
        if state == NOWHERE or level >= _MAX_LEVEL:
            return state
        for token in self.endings if few is None else few:
            if token not in self.stop_token_ids and self.matcher.accept_token(token):
                place = self._behind(level + 1)
                self.matcher.rollback(1)
                if place != NOWHERE:
                    self.guide.add_edge(state, token, place)
        return state

    def _behind(self, level: int) -> int:
        """The state after a token that was tried, if a forced text follows."""
        text = self._text()
        if text:
            return self._demand(text, level).state
        if self.matcher.is_completed():
            return self.guide.add_state(forced=self.stop_token_ids[0])
        return NOWHERE

    def _few(self, row: int) -> list[int] | None:
        """The tokens that a mask allows, if they are few."""
        words = self.rows.array[row]
        if np.count_nonzero(words) > FEW_TOKENS:
            return None
        tokens = list[int]()
        for place in np.flatnonzero(words).tolist():
            word = int(words[place]) & 0xFFFFFFFF
            while word:
                lowest = word & -word
                tokens.append(32 * place + lowest.bit_length() - 1)
                word ^= lowest
        return tokens if len(tokens) <= FEW_TOKENS else None
