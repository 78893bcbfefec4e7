"""Decodes one answer token by token. Characters that are split over tokens are held back until they are complete. All
emitted text, including `flush`, equals the decoding of all tokens at once.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from aerie.workers.structured_output.token_bytes import TokenBytes

MAX_HELD_TOKENS = 8  # a UTF-8 character has at most four bytes, so more incomplete tokens are not one character


class Detokenizer(Protocol):
    def step(self, token: int) -> str:
        """Return the text that `token` completes; "" for unfinished characters and hidden tokens."""
        ...

    def flush(self) -> str:
        """Return the text still held back at the end of an answer, with incomplete characters as U+FFFD."""
        ...


class ByteLevelDetokenizer:
    """For byte-level tokenizers: an answer is the concatenation of its tokens' bytes, read as UTF-8."""

    def __init__(self, vocabulary: TokenBytes, hidden: frozenset[int]) -> None:
        self._bytes_of = vocabulary.of
        self._hidden = hidden
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def step(self, token: int) -> str:
        return "" if token in self._hidden else self._decode(self._bytes_of(token))

    def flush(self) -> str:
        return self._decode(b"", True)


class PrefixDetokenizer:
    """For any tokenizer: decodes the last few tokens with and without the new one; the difference is the new text.

    before: tokens before the answer; some tokenizers add a space at its start or not, depending on these.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._tokens = list(before)
        self._num_read = len(self._tokens)  # tokens whose text has been emitted

    def step(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._tokens.append(token)
        return self._advance(at_end=False)

    def flush(self) -> str:
        return self._advance(at_end=True)

    def _advance(self, at_end: bool) -> str:
        known = self._decode(self._tokens[: self._num_read])
        text = self._decode(self._tokens)
        held = len(self._tokens) - self._num_read
        if text.endswith("\ufffd") and held < MAX_HELD_TOKENS and not at_end:
            return ""
        if held:
            del self._tokens[: self._num_read]
            self._num_read = len(self._tokens)
        return text[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False)) if tokens else ""
