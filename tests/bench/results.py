"""Today's figures: `results.jsonl`, the tables of RESULTS.md and the pictures of docs/ that are made of them.

    python -m tests.bench results     # writes them; a test fails where they differ

A line of `results.jsonl` is one figure (`Figure`). To record a measurement, change or add its line and run the command.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import msgspec

FIGURES = Path(__file__).with_name("results.jsonl")
PAGE = Path(__file__).with_name("RESULTS.md")
_TABLE = re.compile(r"^### (.*?)\n.*?(?=^#|\Z)", re.S | re.M)

Number = float | int


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured value.

    name: table, row and column, each after ": ".
    hardware: what it was measured on, or "simulated".
    commit, date: of the code, YYYY-MM-DD.
    command: that measures it; where it is gone, "(at that commit)" stands after it.
    floor: what reading the bytes takes at the rate of a copy, in the same unit.
    target: asked for before; predicted: expected before; None where nobody said.
    peers: other servers or libraries on the same kind of hardware.
    variants: the same code set otherwise, or at another commit.
    why: the reason for a difference between predicted and measured.
    """

    name: str
    value: Number
    unit: str
    hardware: str
    commit: str
    date: str
    command: str
    floor: Number | None
    target: Number | str | None
    predicted: Number | str | None
    peers: dict[str, Number]
    variants: dict[str, Number]
    why: str

    @property
    def place(self) -> tuple[str, str, str]:
        """Table, row, column."""
        head, row, column = self.name.split(": ")
        return head, row, column


def figures() -> list[Figure]:
    """All of them, in the file's order. Raises msgspec.ValidationError."""
    return [msgspec.json.decode(line, type=Figure) for line in FIGURES.read_bytes().splitlines()]


def page(text: str, found: Sequence[Figure]) -> str:
    """`text` with the table of each ### heading filled in. Raises KeyError for a heading without figures."""
    by_table: dict[str, list[Figure]] = {}
    for figure in found:
        by_table.setdefault(figure.place[0], []).append(figure)
    filled = _TABLE.sub(lambda m: "\n".join([f"### {m[1]}", "", *lines(by_table[m[1]]), "", ""]), text)
    return filled.rstrip("\n") + "\n"


def lines(found: Sequence[Figure]) -> list[str]:
    """A Markdown table of one table's figures, then what was measured where, and why predictions failed."""
    columns = list(dict.fromkeys(figure.place[2] for figure in found))
    rows: list[list[object]] = []
    for name, group in groupby(found, key=lambda figure: figure.place[1]):
        cells = {figure.place[2]: figure for figure in group}
        row = [cells.get(column) for column in columns]
        rows.append([f"**{name}**", *("" if cell is None else f"**{_short(cell.value)}**" for cell in row)])
        beside = {
            "floor": [None if cell is None else cell.floor for cell in row],
            "target": [None if cell is None else cell.target for cell in row],
            "predicted": [None if cell is None else cell.predicted for cell in row],
        }
        for kind in ("peers", "variants"):
            names = dict.fromkeys(key for cell in row if cell for key in getattr(cell, kind))
            beside |= {key: [None if cell is None else getattr(cell, kind).get(key) for cell in row] for key in names}
        rows += [[key, *map(_short, values)] for key, values in beside.items() if any(v is not None for v in values)]
    units = dict.fromkeys(figure.unit for figure in found)
    head = next(iter(units)) if len(units) == 1 else ""
    notes = [f"- {row}, {column}: {figure.why}" for figure in found for _, row, column in [figure.place] if figure.why]
    texts = [f"|{'|'.join(map(str, row))}|" for row in ([head, *columns], *rows)]
    return [texts[0], "|---" * (1 + len(columns)) + "|", *texts[1:], "", *sources(found), *notes]


def sources(found: Sequence[Figure]) -> list[str]:
    """Hardware, commits, dates and commands of a table."""
    where = ", ".join(dict.fromkeys(figure.hardware for figure in found))
    commits = ", ".join(dict.fromkeys(f"`{figure.commit}`" for figure in found))
    dates = sorted({figure.date for figure in found})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    commands = ", ".join(f"`{command}`" for command in dict.fromkeys(figure.command for figure in found))
    return [f"{where}; {commits}; {when}; {commands}"]


def _short(value: Number | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def main() -> None:
    from tests.bench import plots

    found = figures()
    PAGE.write_text(page(PAGE.read_text(), found))
    plots.write(found)


if __name__ == "__main__":
    main()
