"""Ends an answer's text at the first stop string, and holds back text that may start one."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


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
        self._begun = [_Begun(stop) for stop in sorted(set(stops), key=len, reverse=True)]
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
            for begun in self._begun:  # longest first
                if begun.push(character):
                    self._held = ""
                    return StopMatch(text[: end + 1 - len(begun.stop)], begun.stop)
        start = len(text) - max(begun.length for begun in self._begun)
        self._held = text[start:]
        return text[:start]

    def flush(self) -> str:
        """Return the text held back, at the end of the answer or while no stop string counts."""
        held, self._held = self._held, ""
        for begun in self._begun:
            begun.length = 0
        return held


class _Begun:
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
