"""Decodes one answer token by token, and ends its text at the first stop string. Characters that are split over tokens,
and text that may start a stop string, are held back until they are decided. Without stop strings, all emitted text,
including `flush`, equals the decoding of all tokens at once."""

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

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
        """Return the text of the tokens that were not shown yet; "" while their last character is incomplete."""
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


class StopMatch(NamedTuple):
    """A stop string that ends the text.

    shown: the text before it.
    stop: the string itself.
    """

    shown: str
    stop: str


class StopMatcher:
    """Receives text in pieces, and returns the text that is certainly before any stop string.

    The result does not depend on the pieces: the stop string that is complete first ends the text, and of those that
    are complete at the same character the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string"
        self._partial_matches = [_PartialMatch(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""

    def push(self, text: str) -> str | StopMatch:
        """Return the text that may be shown, or the match."""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        before = len(self._held)
        text = self._held + text
        for end in range(before, len(text)):
            character = text[end]
            for partial in self._partial_matches:  # longest first
                if partial.push(character):
                    self._held = ""
                    return StopMatch(text[: end + 1 - len(partial.stop)], partial.stop)
        start = len(text) - max(partial.length for partial in self._partial_matches)
        self._held = text[start:]
        return text[:start]

    def flush(self) -> str:
        """Return the text held back, at the end of the answer or while no stop string counts."""
        held, self._held = self._held, ""
        for partial in self._partial_matches:
            partial.length = 0
        return held


class _PartialMatch:
    """The longest prefix of a stop string that the text ends with, by Knuth, Morris and Pratt (1977): the mean cost per
    character is constant even for hostile texts and strings.

    length: characters of that prefix, fewer than the stop string has.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        # For each prefix of the string that was reached so far, by its length: the length of its longest border (a
        # shorter prefix that it also ends with).
        self._shorter = [0, 0]

    def push(self, character: str) -> bool:
        """Add a character; return whether the string is complete."""
        self.length = self._next(self.length, character)
        if self.length == len(self.stop):
            self.length = 0
            return True
        if self.length == len(self._shorter):
            self._shorter.append(self._next(self._shorter[-1], character))
        return False

    def _next(self, length: int, character: str) -> int:
        """Return the prefix length after `character`, given that before it."""
        stop, shorter = self.stop, self._shorter
        while length and stop[length] != character:
            length = shorter[length]
        return length + 1 if stop[length] == character else 0


def start_of_partial(text: str, strings: Iterable[str]) -> int:
    """Return the start of the longest suffix that starts one of `strings`, none of which is empty; the text's length
    without one."""
    start = len(text)
    for string in strings:
        at = text.find(string[0], max(0, len(text) - len(string) + 1))
        while 0 <= at < start:
            if string.startswith(text[at:]):
                start = at
            at = text.find(string[0], at + 1)
    return start
