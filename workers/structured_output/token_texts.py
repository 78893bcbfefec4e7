"""What the tokens of a vocabulary spell, and how a text that a grammar demands is written in tokens."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

MAX_TOKEN_BYTES = 24  # of tokens that are looked for at the beginning of a text
MAX_TEXT_STATES = 32
_MAX_KEPT = 4096  # texts that are kept


@dataclass(frozen=True)
class TextStates:
    """A demanded text as states, each the place after some of its bytes. The end is no state: -1.

    by_offset: bytes before each state.
    forced: [n] int32, the token with which the model's tokenizer goes on.
    origins, tokens, targets: [m] int32, every token that a state may go on with, and where it leads.
    last: which of these lead to the end.
    """

    by_offset: dict[int, int]
    forced: npt.NDArray[np.int32]
    origins: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    last: npt.NDArray[np.intp]


class TokenTexts:
    """texts: what each token spells, b"" for what stands for no text. tokenizer: writes texts as the model does."""

    def __init__(self, texts: Sequence[bytes], tokenizer: Tokenizer) -> None:
        self._texts = texts
        self._tokenizer = tokenizer
        self._ids: dict[bytes, int] = {}
        for token, text in enumerate(texts):
            if text and len(text) <= MAX_TOKEN_BYTES:
                self._ids.setdefault(text, token)
        self._states: dict[bytes, TextStates] = {}
        self._bytes = bytes(byte for byte in range(256) if bytes((byte,)) in self._ids)
        tokens = np.array([self._ids[bytes((byte,))] for byte in self._bytes], np.int64)
        self._byte_words, self._byte_bits = tokens // 32, (tokens % 32).astype(np.int32)

    def __getitem__(self, token: int) -> bytes:
        return self._texts[token]

    def bytes_allowed(self, words: npt.NDArray[np.int32]) -> bytes:
        """The bytes that a mask [w] allows to be the next token."""
        allowed = np.flatnonzero(words[self._byte_words] >> self._byte_bits & 1)
        return bytes(self._bytes[place] for place in allowed.tolist())

    def states(self, text: bytes) -> TextStates:
        """Of a text that is not empty; of a long one as far as drafts may come."""
        found = self._states.get(text)
        if found is None:
            if len(self._states) >= _MAX_KEPT:
                self._states.clear()
            found = self._states[text] = self._make_states(text)
        return found

    def _make_states(self, text: bytes) -> TextStates:
        usual = self._written(text)
        by_offset, forced, edges = {0: 0}, list[int](), list[tuple[int, int, int]]()
        pending = deque([0])
        while pending:
            offset = pending.popleft()
            state = by_offset[offset]
            beginnings = self._beginnings(text, offset, usual.get(offset))
            forced.append(beginnings[0] if beginnings else -1)
            for token in beginnings:
                target, after = -1, offset + len(self._texts[token])
                if after < len(text):
                    if after not in by_offset:
                        if len(by_offset) == MAX_TEXT_STATES:
                            continue
                        by_offset[after] = len(by_offset)
                        pending.append(after)
                    target = by_offset[after]
                edges.append((state, token, target))
        origins, tokens, targets = np.array(edges, np.int32).reshape(-1, 3).T
        return TextStates(by_offset, np.array(forced, np.int32), origins, tokens, targets, np.flatnonzero(targets < 0))

    def _written(self, text: bytes) -> dict[int, int]:
        """By offset the tokens with which the model's tokenizer writes a text."""
        found, offset = dict[int, int](), 0
        for token in self._tokenizer.encode(text.decode(errors="ignore"), add_special_tokens=False).ids:
            spelt = self._texts[token] if token < len(self._texts) else b""
            if not spelt or not text.startswith(spelt, offset):
                break  # a tokenizer may put a space before every text
            found[offset], offset = token, offset + len(spelt)
        return found

    def _beginnings(self, text: bytes, offset: int, usual: int | None) -> list[int]:
        """The tokens that a text may go on with: the usual one first, if there is one, then the longer ones first."""
        rest = text[offset : offset + MAX_TOKEN_BYTES]
        found = [self._ids[rest[:length]] for length in range(len(rest), 0, -1) if rest[:length] in self._ids]
        return found if usual is None else [usual, *(token for token in found if token != usual)]
