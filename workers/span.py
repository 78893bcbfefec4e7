"""`Span`: the share of something numbered that one rank holds."""

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

    @staticmethod
    def whole(total: int) -> "Span":
        return Span(0, total, total)

    def times(self, size: int) -> "Span":
        """The span of rows, for things of `size` rows each, such as heads."""
        return Span(self.first * size, self.end * size, self.total * size)
