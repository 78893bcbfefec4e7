"""Markdown tables."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table. Floats have three significant digits, or none after the point from 100 on."""
    texts = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in (list(head), *texts)) for i in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in (head, *texts)]
    return [lines[0], "| " + " | ".join("-" * w for w in widths) + " |", *lines[1:]]


def _cell(cell: object) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
