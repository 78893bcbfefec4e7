"""Decodes one answer token by token. Characters that are split over tokens are held back until they are complete. All
emitted text, including `flush`, equals the decoding of all tokens at once.
"""

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
MAX_HELD_TOKENS = 8  # a UTF-8 character has at most four bytes, so more incomplete tokens are not one character


class Detokenizer(Protocol):
    def step(self, token: int) -> str:
        """Return the text that `token` completes; "" for unfinished characters and hidden tokens."""
        ...

    def flush(self) -> str:
        """Return the text still held back at the end of an answer, with incomplete characters as U+FFFD."""
        ...


class TokenBytes:
    """The bytes of each token, computed at its first use.

    is_byte_level: the tokenizer's tokens are bytes. For all other tokenizers: the bytes that a token has in the middle
        of a text. Decoded alone, most of SentencePiece's tokens would lose the space before them, and its byte tokens
        would become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, is_byte_level: bool) -> None:
        self._tokenizer = tokenizer
        self._computed = self._of_bytes if is_byte_level else self._of_piece
        self._bytes: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """Return the bytes; b"" for ids outside the vocabulary, because embeddings are often padded."""
        raw = self._bytes.get(token)
        if raw is None:
            raw = self._bytes[token] = self._computed(token)
        return raw

    def _of_bytes(self, token: int) -> bytes:
        return _token_bytes(self._tokenizer.id_to_token(token) or "")

    def _of_piece(self, token: int) -> bytes:
        name, alone = self._tokenizer.id_to_token(token) or "", self._decode([token])
        byte = _BYTE_TOKEN.fullmatch(name)
        if byte is not None and alone != name:  # the decoder handles byte tokens
            return bytes([int(byte[1], 16)])
        twice = self._decode([token, token])
        return (twice[len(alone) :] if twice.startswith(alone) else alone).encode()

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


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


def _token_bytes(text: str) -> bytes:
    """Return the bytes of a token's printable form, like the byte-level decoder of `tokenizers`: a token with a
    character outside the alphabet, such as an added token with a space, stands for itself."""
    raw = bytearray()
    for character in text:
        byte = BYTE_OF.get(character)
        if byte is None:
            return text.encode()
        raw.append(byte)
    return bytes(raw)


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable characters for the 256 bytes: printable bytes are unchanged, others map to U+0100
    onwards (Radford et al. 2019, `bytes_to_unicode` of the released encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
