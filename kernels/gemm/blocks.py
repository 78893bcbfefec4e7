"""Arithmetic of tile sizes."""

from collections.abc import Iterable


def cdiv(x: int, size: int) -> int:
    """Return x / size, rounded up."""
    return -(-x // size)


def next_power_of_2(x: int) -> int:
    """Return the smallest power of two that is at least x; 0 for 0."""
    return 1 << (x - 1).bit_length() if x > 0 else 0


def largest(sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return float32 cells and tickets of a `Workspace` that is large enough for each of `sizes`."""
    cells, tickets = zip((0, 0), *sizes, strict=True)
    return max(cells), max(tickets)
