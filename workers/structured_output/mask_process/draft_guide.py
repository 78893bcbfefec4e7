"""Fills the masks of a draft tree, and writes the guide for the drafts after it.

The device drafts the next tree right after acceptance, before the host knows the accepted tokens. So the host writes a
guide in advance (`aerie.kernels.drafting.guides`), with a state for every node at which acceptance may
end. There are two kinds of states:

- In a text that the grammar forces, a state has the next token.
- Elsewhere, such as in a string or a number, a state has the mask of the allowed tokens. It has an edge for each token
  after which a text is forced again, because the token ends the string or number. If few tokens are allowed, all of
  them are tried; else those that ended a string or number before (`Endings`).

A guide never affects which token is chosen; a wrong or incomplete guide only lowers acceptance. Called by
`aerie.workers.structured_output.mask_process.request_grammar`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from aerie.kernels.drafting.guides import NOWHERE
from aerie.workers.scheduling.plan import Grammar
from aerie.workers.structured_output.mask_process.token_texts import TextStates, TokenTexts
from aerie.workers.structured_output.mask_table import GuideBlock

if TYPE_CHECKING:
    from aerie.workers.structured_output.mask_process.matcher import Matcher

FEW_TOKENS = 6  # up to this many allowed tokens get an edge each
MAX_ENDINGS = 6  # tokens remembered because a forced text followed them
_MAX_STEPPED_BYTES = 48  # maximum forced text found step by step; the rest follows once these tokens are accepted
# Maximum number of masks that are computed for a guide alone, beside the tree's own; each takes about 50 us. Without a
# limit, guides of recursive schemas took 15 ms, and masks of their trees 1 ms, so each token was late, and 100 tokens
# took 10 s.
MAX_SEARCHES = 32
_MAX_SEARCH_S = 0.005  # CPU time from the first mask of a tree to the last search for its guide
_WHITESPACE = b" \t\n\r"
_MAX_LEVEL = 2  # maximum steps of a guide beyond a node: each to a forced text, or to the position after one


def may_jump(grammar: Grammar) -> bool:
    """Return whether the compiler's search for a forced text ends soon. It has no limit: for `s ::= "a" s` text and
    memory grow forever, and for nested repetitions every byte may take 20 ms (xgrammar 0.2.8)."""
    if grammar.kind == "json_schema":
        return not any(word in grammar.text for word in ('"$ref"', '"$dynamicRef"', '"pattern"', '"patternProperties"'))
    return grammar.kind == "choice" or (grammar.kind == "regex" and "(" not in grammar.text)


class Endings:
    """Tokens after which a grammar forced a text, the newest last.

    is_spaced: whether a space follows colons and commas, if the grammar allows both.
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
    """The step no longer waits for this request's masks."""


@dataclass
class MaskRows:
    """Masks of one tree, before they are copied to the step's masks.

    words: [rows, w] int32: masks of the tree's nodes, then of positions after the tree.
    array: the same memory.
    first: index of the root's mask in the step; the other masks follow.
    end: rows in use, at most `limit`.
    scratch: [1, w] int32.
    check: raises StepClosedError if the step no longer waits.
    """

    words: Tensor
    array: npt.NDArray[np.int32]
    first: int
    end: int
    limit: int
    scratch: Tensor
    check: Callable[[], None] = lambda: None

    def fill(self, matcher: "Matcher", row: int) -> None:
        """Fill the mask of the matcher's next token."""
        self.check()
        matcher.fill(self.words, row)


class _ForcedText(NamedTuple):
    """A forced text and its states in the guide."""

    text: bytes
    states: TextStates
    base: int

    def at(self, offset: int) -> int:
        state = self.states.by_offset.get(offset, NOWHERE)
        return NOWHERE if state == NOWHERE else self.base + state


class _Position(NamedTuple):
    """The guide's position after a node: `offset` bytes into a forced text, or an unforced state whose mask is in
    `row`."""

    state: int
    forced_text: _ForcedText | None = None
    offset: int = 0
    row: int = NOWHERE


@dataclass
class TreeWalk:
    """Fills the masks of one tree, and writes its guide. After an exception the matcher must be rewound.

    any_whitespace: whether the grammar allows any whitespace between the parts of JSON.
    jumps: see `may_jump`; if false, forced texts are found byte by byte.
    ended: the newest token, unless it was forced; it may have ended a string or number.
    num_guided: number of nodes that get a state in the guide: the first, most likely ones.
    max_searches: maximum masks filled only for the guide; after that the rest of it is left out.
    is_forced: for each node that the grammar allows, whether a forced text follows.
    """

    matcher: "Matcher"
    texts: TokenTexts
    endings: Endings
    stop_token_ids: tuple[int, ...]
    rows: MaskRows
    guide: GuideBlock
    num_guided: int
    any_whitespace: bool = False
    jumps: bool = True
    ended: int | None = None
    max_searches: int = MAX_SEARCHES
    is_forced: dict[int, bool] = field(default_factory=dict)
    _until_s: float = 0.0
    _other: int = NOWHERE  # row of the last compared mask
    _other_mask: bytes = b""

    def run(self, tokens: Sequence[int], children: Sequence[Sequence[int]]) -> None:
        """Fill the masks and write the guide. tokens, children: those of each node."""
        self._until_s = time.thread_time() + _MAX_SEARCH_S
        self._visit(0, tokens, children, None)

    def _visit(
        self, node: int, tokens: Sequence[int], children: Sequence[Sequence[int]], above: _Position | None
    ) -> None:
        """Fill the mask of a tree node, set its state in the guide, and visit its children that the grammar accepts.
        above: position of the parent; None for the root."""
        if self.matcher.is_terminated():
            self.rows.array[node] = -1
            return
        self.rows.fill(self.matcher, node)
        position = None
        if node < self.num_guided:
            position = self._position(node, tokens[node], above)
            self.guide.set_node(node, position.state)
            self.is_forced[node] = position.forced_text is not None
            if node == 0 and self.ended is not None and position.forced_text is not None:
                self.endings.add(self.ended)
        for child in children[node]:
            if self.matcher.accept_token(tokens[child]):
                self._visit(child, tokens, children, position)
                self.matcher.rollback(1)

    def _position(self, row: int, token: int, above: _Position | None) -> _Position:
        """Return the position after a node with `token`. row: row of its mask."""
        if above is not None and above.forced_text is not None:
            forced_text, text = above.forced_text, self.texts[token]
            offset = above.offset + len(text)
            if offset < len(forced_text.text) and forced_text.text.startswith(text, above.offset):
                state = forced_text.at(offset)
                if state != NOWHERE:
                    return _Position(state, forced_text, offset)
        elif above is not None and above.row != NOWHERE and self._masks_are_equal(row, above.row):
            return above
        return self._position_here(row, 0)

    def _masks_are_equal(self, row: int, other: int) -> bool:
        if other != self._other:
            self._other, self._other_mask = other, self.rows.array[other].tobytes()
        mask: bytes = self.rows.array[row].tobytes()
        return mask == self._other_mask  # several times faster than numpy's comparison

    def _position_here(self, row: int, level: int) -> _Position:
        """Return the matcher's position. row: row of its mask, if filled."""
        text = self._text()
        if text:
            return self._add_forced_text(text, level)
        few = self._few_tokens(row) if row != NOWHERE else None
        if self.matcher.is_completed() and (row == NOWHERE or few is not None and set(few) <= set(self.stop_token_ids)):
            return _Position(self.guide.add_state(forced=self.stop_token_ids[0]))
        state = self._open(row, few, level)
        return _Position(state, row=NOWHERE if state == NOWHERE else row)

    def _text(self) -> bytes:
        """Return the forced text, or its beginning. Optional whitespace is taken from earlier answers."""
        if self.jumps and not self.any_whitespace:
            return self.matcher.jump()
        text, taken = b"", 0
        while len(text) < _MAX_STEPPED_BYTES:
            part = self._part(text)
            if not part or not self.matcher.accept_string(part):
                break
            text, taken = text + part, taken + 1
        if taken:
            self.matcher.rollback(taken)
        return text

    def _part(self, text: bytes) -> bytes:
        """Return the text forced after `text`, or its first byte; or what may follow optional whitespace. b"" if there
        are several continuations, if the text may end, or if the guide has reached its limits."""
        part = self.matcher.jump() if self.jumps else b""
        if part or self.matcher.is_terminated() or self.max_searches <= 0 or time.thread_time() > self._until_s:
            return part
        may_end = self.matcher.is_completed()
        if may_end and not self.any_whitespace:
            return b""
        self.rows.check()
        self.max_searches -= 1
        self.matcher.fill(self.rows.scratch)
        allowed = self.texts.bytes_allowed(self.rows.scratch[0].numpy())
        if len(allowed) == 1 and not may_end:
            return allowed
        others = [byte for byte in allowed if byte not in _WHITESPACE]
        if not self.any_whitespace or len(others) == len(allowed):
            return b""
        is_spaced = self.endings.is_spaced and text[-1:] in (b":", b",") and ord(" ") in allowed
        return (b" " if is_spaced else b"") + (bytes(others) if len(others) == 1 else b"")

    def _add_forced_text(self, text: bytes, level: int) -> _Position:
        """Add the states of a text that the grammar forces to the guide, and return the position at its start."""
        states = self.texts.states(text)
        if len(states.forced) > self.guide.room:
            return _Position(NOWHERE)
        forced_text = _ForcedText(text, states, self.guide.add_forced_states(states.forced))
        end = self._after_text(text, level) if level < _MAX_LEVEL else NOWHERE
        targets = states.targets + forced_text.base
        targets[states.last] = end
        self.guide.add_edges(states.origins + forced_text.base, states.tokens, targets)
        return _Position(forced_text.base, forced_text)

    def _after_text(self, text: bytes, level: int) -> int:
        """Return the state after a forced text."""
        if not self.matcher.accept_string(text):
            return NOWHERE
        row = NOWHERE
        if self.rows.end < self.rows.limit and not self.matcher.is_terminated():
            row, self.rows.end = self.rows.end, self.rows.end + 1
            self.rows.fill(self.matcher, row)
        state = self._position_here(row, level + 1).state
        self.matcher.rollback(1)
        return state

    def _open(self, row: int, few: list[int] | None, level: int) -> int:
        """Return the state of a position with several allowed tokens. few: these tokens, if they are few."""
        mask = NOWHERE if row == NOWHERE else self.rows.first + row
        state = self.guide.add_state(row=mask, stays=few is None)
        if state == NOWHERE or level >= _MAX_LEVEL or self.max_searches <= 0:
            return state
        for token in self.endings if few is None else few:
            if token not in self.stop_token_ids and self.matcher.accept_token(token):
                target = self._after_token(level + 1)
                self.matcher.rollback(1)
                if target != NOWHERE:
                    self.guide.add_edge(state, token, target)
        return state

    def _after_token(self, level: int) -> int:
        """Return the state after a tried token if a forced text follows; else `NOWHERE`."""
        text = self._text()
        if text:
            return self._add_forced_text(text, level).state
        if self.matcher.is_completed():
            return self.guide.add_state(forced=self.stop_token_ids[0])
        return NOWHERE

    def _few_tokens(self, row: int) -> list[int] | None:
        """Return the tokens that a mask allows; None if they are many."""
        words = self.rows.array[row]
        if np.count_nonzero(words) > FEW_TOKENS:
            return None
        tokens = list[int]()
        for index in np.flatnonzero(words).tolist():
            word = int(words[index]) & 0xFFFFFFFF
            while word:
                lowest = word & -word
                tokens.append(32 * index + lowest.bit_length() - 1)
                word ^= lowest
        return tokens if len(tokens) <= FEW_TOKENS else None
