"""The figures: each is whole, the page is made of them, and what the README says is among them."""

import datetime
import re
from collections import Counter

import pytest

from tests.bench.__main__ import BENCHES
from tests.bench.plots import DOCS, PLOTS
from tests.bench.results import PAGE, Figure, figures, lines, page
from tests.bench.served import ROOT

MAX_WORDS = 5000  # of both pages
README_ROUNDS = ("no speculation", "chain 3/1/4", "tree 5/4/8")
README_ROUNDS_AT = ("Rounds of Llama-3.1-8B", "batch 1")


def test_figures_are_whole_and_named_once() -> None:
    found = figures()
    assert not [name for name, count in Counter(figure.name for figure in found).items() if count > 1]
    for figure in found:
        assert len(figure.place) == 3 and figure.unit and figure.hardware
        assert re.fullmatch("[0-9a-f]{7}", figure.commit), figure
        assert datetime.date(2026, 1, 1) < datetime.date.fromisoformat(figure.date), figure


def test_commands_exist_or_say_that_they_are_gone() -> None:
    for command in {figure.command for figure in figures()}:
        ours = re.match(r"python -m tests\.bench (\w+)", command)
        if ours:
            assert ours[1] in {"cpu", *BENCHES}, command
        else:
            assert command.startswith(("make ", "python -m tests.support.")) or command.endswith("(at that commit)")


def test_tables_of_a_page_are_those_of_the_file() -> None:
    """After a change of `results.jsonl`: python -m tests.bench results."""
    assert PAGE.read_text() == page(PAGE.read_text(), figures())
    assert {figure.place[0] for figure in figures()} == set(re.findall("^### (.*)$", PAGE.read_text(), re.M))


def test_pictures_are_those_of_the_file() -> None:
    for name, plot in PLOTS.items():
        assert (DOCS / name).read_text() == plot(figures()), name


def test_both_pages_stay_short() -> None:
    texts = [path.read_text() for path in (PAGE, PAGE.with_name("EXPERIMENTS.md"))]
    assert sum(len(text.split()) for text in texts) <= MAX_WORDS


def test_the_figures_of_the_readme_are_among_them() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(
        r"at batch 1 takes ([\d.]+) ms without speculation, ([\d.]+) with a chain of 4 and ([\d.]+) with a tree",
        text,
    )
    assert said is not None
    rounds = {figure.place[1]: figure.value for figure in figures() if figure.place[::2] == README_ROUNDS_AT}
    assert [float(value) for value in said.groups()] == [rounds[shape] for shape in README_ROUNDS]


def test_a_table_has_floors_peers_and_reasons_beside_its_figures() -> None:
    base = {"unit": "ms", "hardware": "H200", "commit": "0123456", "date": "2026-11-24", "command": "make bench"}
    bare = {"floor": None, "target": None, "predicted": None, "peers": {}, "variants": {}, "why": ""}
    found = [
        Figure(name="T: a: x", value=4.16, **base, **bare | {"floor": 3.5, "peers": {"vLLM": 4.96}}),  # type: ignore[arg-type]
        Figure(name="T: a: y", value=1200, **base, **bare | {"predicted": "900", "why": "Cold."}),  # type: ignore[arg-type]
    ]
    assert lines(found) == [
        "|ms|x|y|",
        "|---|---|---|",
        "|**a**|**4.16**|**1,200**|",
        "|floor|3.5||",
        "|predicted||900|",
        "|vLLM|4.96||",
        "",
        "H200; `0123456`; 2026-11-24; `make bench`",
        "- a, y: Cold.",
    ]
    with pytest.raises(KeyError):
        page("### Other\n", found)
    assert page("text\n### T\nold\n\n## Next\n", found) == "\n".join(
        ["text", "### T", "", *lines(found), "", "## Next", ""]
    )
