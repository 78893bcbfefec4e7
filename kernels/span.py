"""`Span`: one rank's contiguous share of rows, columns, heads or experts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """[first, end) of `total` rows, columns, heads or experts."""

    first: int
    end: int
    total: int

    @property
    def size(self) -> int:
        return self.end - self.first

    @property
    def is_whole(self) -> bool:
        return self.size == self.total

    @staticmethod
    def whole(total: int) -> "Span":
        return Span(0, total, total)

    def times(self, size: int) -> "Span":
        """Return the span in rows, if each item (such as a head) has `size` rows."""
        return Span(self.first * size, self.end * size, self.total * size)
