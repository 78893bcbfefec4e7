"""Ends an answer's text at the first stop string, and lets no text out that may turn out to begin one."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string that ends the text.

    shown: the text in front of it.
    stop: the string itself.
    """

    shown: str
    stop: str


class StopMatcher:
    """Text goes in as it comes; what is sure to be in front of any stop comes out.

    Works as if the text came one character at a time, however it is cut: the stop string that is complete first ends
    it, and of those complete at the same character the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string"
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str) -> str | StopMatch:
        """The text that may be shown now, or the match."""
        if not self._stops:
            return text
        text = self._held + text
        match = self._earliest(text)
        if match is not None:
            end, stop = match
            self._held = ""
            return StopMatch(text[: end - len(stop)], stop)
        start = start_of_partial(text, self._stops)
        self._held = text[start:]
        return text[:start]

    def flush(self) -> str:
        """The text held back, when the answer ends without a stop string or nothing may match yet."""
        held, self._held = self._held, ""
        return held

    def _earliest(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, str] | None = None
        for stop in self._stops:  # longest first, so that a shorter one must end earlier to win
            at = text.find(stop)
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = at + len(stop), stop
        return best


def start_of_partial(text: str, strings: Iterable[str]) -> int:
    """Return the start of the longest suffix that begins one of `strings`, none of which is empty; the text's length
    without one."""
    start = len(text)
    for string in strings:
        at = text.find(string[0], max(0, len(text) - len(string) + 1))
        while 0 <= at < start:
            if string.startswith(text[at:]):
                start = at
            at = text.find(string[0], at + 1)
    return start
