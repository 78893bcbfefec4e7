"""Tables, figures and a chart of what `draft_methods` measured.

    python -m tests.bench draft_figures LOG ... [--plot FILE]
    python -m tests.bench draft_figures LOG ... --record --hardware TEXT --commit COMMIT --date YYYY-MM-DD
    python -m tests.bench results

Reads the JSON lines of the logs; other lines are skipped. Prints, for each model and batch size, tokens a round and
tokens per CPU second by draft and text, and each adaptive arm's rate over the best of its draft's static ones and none.
Answers that differ from those without a draft are counted.

--record puts batch size 1 into the table "Tokens a round, by draft and text" of `results.jsonl`, without new rows of
static shapes between the least and the whole and of adaptive shapes with a branch. Under an adaptive arm stands its
rate over the best static one's.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import msgspec

from aerie.deploy.bench.figures import table
from tests.bench.quality.draft_methods import Row, is_adaptive
from tests.bench.results import FIGURES, Figure, figures

TABLE = "Tokens a round, by draft and text"
COLUMNS = {"gsm8k": "GSM8K", "mt_bench": "MT-Bench", "humaneval": "HumanEval", "JSON to copy": "JSON"}
OF_BEST = "share-of-best"  # one word: the pages of figures have a limit of words
BETWEEN = ("2/1/3", "4/1/5", "4/2/8", "6/2/8", "suffix/3", "suffix/7", "adaptive+8")
COMMAND = "python -m tests.bench draft_methods --model pair hybrid --prompts 16 --data EVAL"


def read(paths: list[Path]) -> dict[str, list[Row]]:
    """Return the rows by model."""
    found: dict[str, list[Row]] = {}
    for line in (line for path in paths for line in path.read_text().splitlines()):
        if line.startswith('{"bench": "draft_methods"'):
            of_draft = json.loads(line)
            found.setdefault(of_draft["model"], []).extend(Row(**row) for row in of_draft["rows"])
    return found


def draft_of(arm: str) -> str:
    """Return an arm's draft: what its name has before the shape."""
    return arm.partition(",")[0].partition("/")[0]


def lines(rows: list[Row]) -> list[str]:
    """Return the table of one model and batch size."""
    kinds, names = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("text", "arm"))
    of = {(row.arm, row.text): f"{row.tokens_per_round:.2f} / {row.tokens_per_cpu_s:.0f}" for row in rows}
    return table(["drafts", *kinds], [(name, *(of.get((name, kind), "") for kind in kinds)) for name in names])


def num_different(rows: list[Row]) -> dict[str, int]:
    """Return how many answers of each arm differ from those without a draft, where any does."""
    plain = {(row.draft, row.text, row.batch): row.answers for row in rows if draft_of(row.arm).endswith("none")}
    found: Counter[str] = Counter()
    for row in rows:
        expected = plain.get((row.draft, row.text, row.batch), row.answers)
        found[row.arm] += sum(a != b for a, b in zip(row.answers, expected, strict=True))
    return {arm: count for arm, count in found.items() if count}


def ratios(rows: list[Row]) -> dict[tuple[str, str], float]:
    """Return the rate of every adaptive arm and text over the best static one's that answered in turn with it, for rows
    of one model and batch size."""
    best: dict[tuple[str, str], float] = {}
    for row in (row for row in rows if not is_adaptive(row.arm)):
        key = row.draft, row.text
        best[key] = max(best.get(key, 0.0), row.tokens_per_cpu_s)
    return {
        (row.arm, row.text): row.tokens_per_cpu_s / best[row.draft, row.text] for row in rows if is_adaptive(row.arm)
    }


def new_figures(rows: list[Row], hardware: str, commit: str, date: str) -> list[Figure]:
    """Return the figures of one model's rows at batch size 1."""
    rows = [row for row in rows if row.batch == 1 and row.text in COLUMNS]
    shares = ratios(rows)
    found = []
    for row in rows:
        share = shares.get((row.arm, row.text))
        beside = {} if share is None else {OF_BEST: round(share, 2)}
        rate: float | int = round(row.tokens_per_cpu_s)
        for column, value, unit, variants in (
            (COLUMNS[row.text], round(row.tokens_per_round, 2), "tokens", {}),
            (f"{COLUMNS[row.text]}/s", rate, "tokens/CPU s", beside),
        ):
            name = f"{TABLE}: {row.arm}: {column}"
            found.append(Figure(name, value, unit, hardware, commit, date, COMMAND, None, None, None, {}, variants, ""))
    return sorted(found, key=lambda figure: figure.place[2].endswith("/s"))


def merged(before: list[Figure], new: list[Figure]) -> list[Figure]:
    """Return the figures with those of `new` in their place: at their name, else after the last one of the table's
    same row or draft, else after the table's last. New rows of shapes between are left out."""
    rows = {figure.place[:2] for figure in before}
    by_name = {each.name: each for each in new if each.place[:2] in rows or not each.place[1].endswith(BETWEEN)}
    found = [by_name.pop(figure.name, figure) for figure in before]
    for figure in by_name.values():
        table_name, row, _ = figure.place
        last = [i for i, each in enumerate(found) if each.place[:2] == (table_name, row)]
        last = last or [i for i, e in enumerate(found) if e.place[0] == table_name and _same_draft(e.place[1], row)]
        last = last or [i for i, each in enumerate(found) if each.place[0] == table_name]
        found.insert(last[-1] + 1 if last else len(found), figure)
    return found


def _same_draft(one: str, other: str) -> bool:
    return draft_of(one) == draft_of(other)


def plot(rows: list[Row], path: Path) -> None:
    """Draw bars of tokens a round, by text and arm. Needs matplotlib."""
    from matplotlib import pyplot

    names, kinds = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("arm", "text"))
    figure, axes = pyplot.subplots(figsize=(9, 0.22 * len(rows) + 1))
    for i, name in enumerate(names):
        of = {row.text: row.tokens_per_round for row in rows if row.arm == name}
        bars = [(k * (len(names) + 1) + i, of[kind]) for k, kind in enumerate(kinds) if kind in of]
        axes.barh([at for at, _ in bars], [value for _, value in bars], label=name)
    axes.set_yticks([k * (len(names) + 1) + len(names) / 2 for k in range(len(kinds))], kinds)
    axes.invert_yaxis()
    axes.set_xlabel("tokens a round")
    axes.legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight")


def _report(model: str, rows: list[Row]) -> None:
    for batch in sorted({row.batch for row in rows}):
        some = [row for row in rows if row.batch == batch]
        print(f"\n{model}, batch {batch}: tokens a round / tokens per CPU second\n", *lines(some), sep="\n")
        kinds = list(dict.fromkeys(row.text for row in some))
        cells = {key: f"{share:.3f}" for key, share in ratios(some).items()}
        body = [
            (arm, *(cells.get((arm, kind), "") for kind in kinds)) for arm in dict.fromkeys(arm for arm, _ in cells)
        ]
        print("\nadaptive over the best of its draft's shapes and none\n", *table(["drafts", *kinds], body), sep="\n")
    print(f"\nanswers that differ: {num_different(rows) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--plot", type=Path, help="SVG or PNG file: a bar chart of the first model")
    parser.add_argument("--record", action="store_true", help="write the figures into results.jsonl")
    for name in ("hardware", "commit", "date"):
        parser.add_argument(f"--{name}", default="", help="of the figures that --record writes")
    given = parser.parse_args()
    found = read(given.logs)
    for model, rows in found.items():
        _report(model, rows)
    if given.plot is not None:
        plot(next(iter(found.values())), given.plot)
    if given.record:
        new = [f for rows in found.values() for f in new_figures(rows, given.hardware, given.commit[:7], given.date)]
        after = merged(figures(), new)
        FIGURES.write_bytes(b"".join(json.dumps(msgspec.to_builtins(figure)).encode() + b"\n" for figure in after))
        print(f"{len(new)} figures written; now run python -m tests.bench results")


if __name__ == "__main__":
    main()
