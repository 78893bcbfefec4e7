"""Tables, figures and a chart of what `draft_methods` measured.

    python -m tests.bench draft_figures LOG ... [--plot FILE]
    python -m tests.bench draft_figures LOG ... --record --hardware TEXT --commit COMMIT --date YYYY-MM-DD
    python -m tests.bench results

Reads the JSON lines of the logs; other lines are skipped. Prints, for each model and batch size, tokens a round and
tokens per CPU second by draft and text, and each adaptive arm's rate over the best static one's: of the same draft, and
of all drafts. Each ratio stands twice: as measured, and with one mean time for all rounds of a shape, which differences
between cores disturb less. Answers that differ from those without a draft are counted.

--record puts batch size 1 into the table "Tokens a round, by draft and text" of `results.jsonl`, without new rows of
static shapes between the least and the whole and of adaptive shapes with a branch. Under an adaptive arm stands its
rate over the best static arm's of the same draft, by mean times if they are known.
"""

import argparse
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deploy.bench.table import table
from tests.bench.quality.draft_methods import Row
from tests.bench.results import FIGURES, Figure, figures

TABLE = "Tokens a round, by draft and text"
COLUMNS = {"gsm8k": "GSM8K", "mt_bench": "MT-Bench", "humaneval": "HumanEval", "JSON to copy": "JSON"}
OF_BEST = "share-of-best"  # one word: the pages of figures have a limit of words
BETWEEN = ("2/1/3", "4/1/5", "4/2/8", "6/2/8", "suffix/3", "suffix/7", "adaptive+8")
COMMAND = "python -m tests.bench draft_methods --model pair hybrid --prompts 8 --data EVAL"


@dataclass(frozen=True)
class Ratio:
    """An adaptive arm's tokens a second over those of the best static arm.

    measured: by CPU time. by_shape: as if every step of a shape took that shape's mean time.
    """

    measured: float
    by_shape: float


def read(paths: list[Path]) -> dict[str, list[Row]]:
    """Return the rows by model, in the order of arms that `draft_methods` has."""
    found: dict[str, list[Row]] = {}
    for line in (line for path in paths for line in path.read_text().splitlines()):
        if line.startswith('{"bench": "draft_methods"'):
            arm = json.loads(line)
            found.setdefault(arm["model"], []).extend(Row(**row) for row in arm["rows"])
    return found


def draft_of(arm: str) -> str:
    """Return an arm's draft: what its name has before the shape."""
    return arm.partition(",")[0].partition("/")[0]


def is_adaptive(arm: str) -> bool:
    return "adaptive" in arm


def lines(rows: list[Row]) -> list[str]:
    """Return the table of one model and batch size."""
    kinds, names = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("text", "arm"))
    of = {(row.arm, row.text): f"{row.tokens_per_round:.2f} / {row.tokens_per_cpu_s:.0f}" for row in rows}
    return table(["drafts", *kinds], [(name, *(of.get((name, kind), "") for kind in kinds)) for name in names])


def num_different(rows: list[Row]) -> dict[str, int]:
    """Return how many answers of each arm differ from those without a draft, where any does."""
    plain = {(row.text, row.batch): row.answers for row in rows if draft_of(row.arm).endswith("none")}
    found: Counter[str] = Counter()
    for row in rows:
        expected = plain.get((row.text, row.batch), row.answers)
        found[row.arm] += sum(a != b for a, b in zip(row.answers, expected, strict=True))
    return {arm: count for arm, count in found.items() if count}


def ratios(rows: list[Row], own: bool) -> dict[tuple[str, str], Ratio]:
    """Return the ratio of every adaptive arm and text, of one model and batch size. own: compare with static arms of
    the same draft and with none; otherwise with all static arms. Arms without a static one are left out."""
    times = _step_s([row for row in rows if not is_adaptive(row.arm)])
    found = {}
    for row in (row for row in rows if is_adaptive(row.arm)):
        draft = draft_of(row.arm)
        static = [each for each in rows if each.text == row.text and not is_adaptive(each.arm)]
        if own:
            static = [each for each in static if draft_of(each.arm) == draft or each.arm.endswith("none")]
        if static:
            measured = row.tokens_per_cpu_s / max(each.tokens_per_cpu_s for each in static)
            by_shape = _modelled(row, times) / max(_modelled(each, times) for each in static)
            found[row.arm, row.text] = Ratio(measured, by_shape)
    return found


def _step_s(rows: list[Row]) -> dict[tuple[str, str], float]:
    """Return CPU seconds of a step by draft and shape, from static arms: the mean over their texts. Rounds without
    drafts have the time of the arm without a draft."""
    seconds: Counter[tuple[str, str]] = Counter()
    steps: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for shape in row.steps if len(row.steps) == 1 else ():
            seconds[draft_of(row.arm), shape] += row.cpu_s  # type: ignore[assignment]
            steps[draft_of(row.arm), shape] += row.steps[shape]
    return {key: seconds[key] / steps[key] for key in seconds}


def _modelled(row: Row, times: dict[tuple[str, str], float]) -> float:
    """Return tokens a second if every step of a shape took its mean time; NaN for shapes that no static arm has."""
    draft = draft_of(row.arm)
    plain = next((s for (name, shape), s in times.items() if shape == "plain" and name.endswith("none")), math.nan)
    seconds = sum(
        count * (plain if shape == "plain" else times.get((draft, shape), math.nan))
        for shape, count in row.steps.items()
    )
    return row.tokens / seconds if seconds else math.nan


def new_figures(rows: list[Row], hardware: str, commit: str, date: str) -> list[Figure]:
    """Return the figures of one model's rows at batch size 1."""
    rows = [row for row in rows if row.batch == 1 and row.text in COLUMNS]
    own = ratios(rows, own=True)
    found = []
    for row in rows:
        ratio = own.get((row.arm, row.text))
        share = math.nan if ratio is None else ratio.measured if math.isnan(ratio.by_shape) else ratio.by_shape
        beside = {} if math.isnan(share) else {OF_BEST: round(share, 2)}
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
        for own, name in ((True, "the best of its own shapes and none"), (False, "the best static arm")):
            found = ratios(some, own)
            cells = {key: f"{ratio.measured:.2f} / {ratio.by_shape:.2f}" for key, ratio in found.items()}
            arms = dict.fromkeys(arm for arm, _ in found)
            body = [(arm, *(cells.get((arm, kind), "") for kind in kinds)) for arm in arms]
            print(f"\nadaptive over {name}: measured / by mean times\n", *table(["drafts", *kinds], body), sep="\n")
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
