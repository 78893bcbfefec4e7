"""Counts the tokens of long texts piece by piece. So a text that is too long is never encoded as a whole, which takes
hundreds of bytes of memory per token.

A cut may split a token, so the sum over pieces is slightly too large.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

PIECE_CHARS = 2**16
_SEARCH_CHARS = 256  # characters before a piece's end that are searched for a space, with which most tokens start
SLACK_TOKENS = 1024  # additional tokens encoded before the kept part, so that the cut does not change the kept ones

Count = Callable[[str], int]


class TooManyTokensError(ValueError):
    """num_tokens: a lower bound on the text's tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"more than {num_tokens} tokens")
        self.num_tokens = num_tokens


def exceeds(count: Count, text: str, num_tokens: int) -> bool:
    """Whether `text` certainly has more tokens, in spite of cuts."""
    found = 0
    for number, (start, end) in enumerate(_pieces(text)):
        found += count(text[start:end])
        if found - 8 * number > num_tokens:
            return True
    return False


@dataclass(frozen=True)
class Truncation:
    """The tokens of a prompt that is truncated.

    num_tokens: maximum number.
    at_end: keep the last ones, else the first.
    """

    num_tokens: int
    at_end: bool = True

    def of(self, tokens: list[int]) -> list[int]:
        """Return the kept part of `tokens`."""
        return tokens[-self.num_tokens :] if self.at_end else tokens[: self.num_tokens]

    def part(self, count: Count, text: str) -> tuple[int, int]:
        """Return start and end of a part of `text` that contains these tokens, and some more."""
        pieces = list(_pieces(text))
        found = 0
        for start, end in reversed(pieces) if self.at_end else pieces:
            found += count(text[start:end])
            if found > self.num_tokens + SLACK_TOKENS:
                return (start, len(text)) if self.at_end else (0, end)
        return 0, len(text)


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(text):
        end = min(len(text), start + PIECE_CHARS)
        if end < len(text):
            space = text.rfind(" ", end - _SEARCH_CHARS, end)
            end = space if space > start else end
        yield start, end
        start = end
