"""Counts the reasoning tokens of an answer, for the usage."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from cluster.http.parsers.output_parser import ReplyDelta


class ReasoningTokens:
    """Counts the tokens of the reasoning's text, without the marks around it.

    A parser holds text back and strips white space, so the reasoning is searched in the text of the tokens.
    """

    def __init__(self) -> None:
        self._text = b""  # text of the tokens, until the reasoning starts
        self._ends: list[int] = []  # end of each token's bytes in the answer's
        self._start = -1  # start of the reasoning's bytes
        self._num_bytes = 0
        self._is_over = False

    def push(self, delta: ReplyDelta, token_bytes: Iterable[bytes]) -> None:
        """token_bytes: bytes of the tokens of `delta`'s piece."""
        if self._is_over:
            return
        for each in token_bytes:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(each))
            if self._start < 0:
                self._text += each
        reasoning = delta.reasoning.encode()
        if reasoning and self._start < 0:
            self._start, self._text = max(0, self._text.find(reasoning)), b""
        self._num_bytes += len(reasoning)
        self._is_over = bool(delta.content or delta.tool_calls)

    @property
    def num(self) -> int:
        """Number of reasoning tokens so far."""
        if not self._num_bytes:
            return 0
        end = self._start + self._num_bytes
        return min(len(self._ends), bisect_left(self._ends, end) + 1) - bisect_right(self._ends, self._start)
