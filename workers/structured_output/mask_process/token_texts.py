"""The bytes of each token, and the token sequences that spell a text forced by a grammar."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

MAX_TOKEN_BYTES = 24  # maximum size of proposed tokens
MAX_TEXT_STATES = 32  # maximum states of a forced text
_MAX_CACHED = 4096  # number of texts whose states are cached


@dataclass(frozen=True)
class TextStates:
    """The states of a forced text: one for each offset that tokens reach. The end of the text has no state (-1).

    by_offset: state by byte offset.
    forced: [states] int32, the next token as the model's tokenizer spells the text.
    origins, tokens, targets: [edges] int32, every state, each token that fits there, and the next state.
    last: indices of the edges that lead to the end.
    """

    by_offset: dict[int, int]
    forced: npt.NDArray[np.int32]
    origins: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    last: npt.NDArray[np.intp]


class TokenTexts:
    """Texts of a vocabulary's tokens.

    texts: bytes of each token; b"" for tokens without a text.
    tokenizer: the model's tokenizer.
    """

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
        """Return the single-byte tokens that a mask [w] allows, as bytes."""
        allowed = np.flatnonzero(words[self._byte_words] >> self._byte_bits & 1)
        return bytes(self._bytes[index] for index in allowed.tolist())

    def states(self, text: bytes) -> TextStates:
        """Return the states of a non-empty text; for a long one only the first `MAX_TEXT_STATES`."""
        states = self._states.get(text)
        if states is None:
            if len(self._states) >= _MAX_CACHED:
                self._states.clear()
            states = self._states[text] = self._make_states(text)
        return states

    def _make_states(self, text: bytes) -> TextStates:
        """Return the states of a text that a grammar forces: one for each offset that token sequences reach, at most
        `MAX_TEXT_STATES`, and the tokens that lead from one to another."""
        written = self._written(text)
        by_offset, forced, edges = {0: 0}, list[int](), list[tuple[int, int, int]]()
        pending = deque([0])
        while pending:
            offset = pending.popleft()
            state = by_offset[offset]
            beginnings = self._beginnings(text, offset, written.get(offset))
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
        """Return the tokens of the model's tokenizer for a text, by offset."""
        tokens, offset = dict[int, int](), 0
        for token in self._tokenizer.encode(text.decode(errors="ignore"), add_special_tokens=False).ids:
            spelt = self._texts[token] if token < len(self._texts) else b""
            if not spelt or not text.startswith(spelt, offset):
                break  # a tokenizer may put a space before every text
            tokens[offset], offset = token, offset + len(spelt)
        return tokens

    def _beginnings(self, text: bytes, offset: int, written: int | None) -> list[int]:
        """Return the tokens that fit at `offset`: the tokenizer's choice (`written`) first, then the longest first."""
        rest = text[offset : offset + MAX_TOKEN_BYTES]
        tokens = [self._ids[rest[:length]] for length in range(len(rest), 0, -1) if rest[:length] in self._ids]
        return tokens if written is None else [written, *(token for token in tokens if token != written)]
