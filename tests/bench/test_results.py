"""The figures: each is whole, the page is made of them, and what the README says is among them."""

import datetime
import re
from collections import Counter

import pytest

from tests.bench.__main__ import BENCHES
from tests.bench.plots import DOCS, PLOTS
from tests.bench.results import PAGE, Figure, figures, lines, page
from tests.bench.served import ROOT

MAX_WORDS = 7000
README_ROUNDS = ("no speculation", "chain 3/1/4", "tree 5/4/8")
README_ROUNDS_AT = ("Rounds of Llama-3.1-8B", "batch 1")
# Shipped configuration -> table of its dimensions.
HYBRID_ROWS = {"no speculation", "MTP chain of 3"}
# configuration -> table, and rows that its head has at least
HEADS = {
    "qwen3.6-27b": ("Rounds of Qwen3.5-27B", HYBRID_ROWS),
    "qwen3.8-27b": ("Rounds of Qwen3.5-27B", HYBRID_ROWS),
    "qwen3.6-35b-a3b": ("Rounds of Qwen3.5-35B-A3B", HYBRID_ROWS),
    "gpt-oss-20b": (
        "Rounds of published models",
        {"gpt-oss-20b, no speculation", "gpt-oss-120b, no speculation"},
    ),
}


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
            known = ("make ", "python -m tests.support.", "python -m pytest tests/", "aerie check-cache")
            assert command.startswith(known) or command.endswith("(at that commit)")


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


@pytest.mark.parametrize("name", HEADS)
def test_the_heads_of_configurations_say_the_figures(name: str) -> None:
    """Rounds at 1 / 8 / 32 requests, and what a token takes: a round by its tokens."""
    head = (ROOT / "deploy" / f"{name}.yaml").read_text().partition("proxy_location")[0].partition("Milliseconds")[2]
    table, rows = HEADS[name]
    of_table = {figure.place[1:]: figure.value for figure in figures() if figure.place[0] == table}
    columns = ("batch 1", "batch 8", "batch 32")
    said = re.findall(r"^#   (.+?)  +([\d.]+(?: / [\d.]+)*)(?:  +([\d.]+) a token at 1 with ([\d.]+))?", head, re.M)
    assert rows <= {row for row, *_ in said} and "Not measured" not in head
    for row, values, each, tokens in said:
        measured = [of_table[row, column] for column in columns if (row, column) in of_table]
        assert values == " / ".join(f"{value:g}" for value in measured), (row, "is in results.jsonl", measured)
        assert not each or each == f"{measured[0] / float(tokens):.2f}", (row, "a token")


def test_a_token_takes_a_round_by_its_tokens() -> None:
    found = {figure.name: figure for figure in figures()}
    derived = [figure for figure in found.values() if figure.place[1].endswith(", a token")]
    assert derived
    for figure in derived:
        tokens = re.fullmatch(r"A round of ([\d.]+) tokens\.", figure.why)
        assert tokens is not None, figure
        rounds = found[figure.name.replace(", a token", "")]
        assert (figure.value, figure.commit) == (round(rounds.value / float(tokens[1]), 2), rounds.commit), figure


def test_the_cost_of_fewer_bits_in_the_docs_is_among_them() -> None:
    """Losses, and the range of tokens a round."""
    text = " ".join((ROOT / "docs" / "quantised-checkpoints.md").read_text().split())
    of_table = {figure.place[1:]: figure.value for figure in figures() if figure.place[0] == "Fewer bits"}
    rounds = re.findall(r"([\d.]+) to ([\d.]+)(?: tokens a round of the first)? \(([\d.]+)", text)
    models = (("pair", "w4a16"), ("DeepSeek-c7fef71", "w4a16-g32"))
    for (model, scheme), said in zip(models, rounds, strict=True):
        losses = of_table[f"{model}/bfloat16", "loss"], of_table[f"{model}/{scheme}", "loss"]
        for loss in (*losses, of_table[f"{model}/{scheme}", "loss-calibrated"]):
            assert re.search(rf"\b{loss:g}\b", text), (model, loss)
        tokens = {row: value for row, value in of_table.items() if row[0].startswith(model) and "round" in row[1]}
        plain = tokens.pop((f"{model}/bfloat16", "tokens/round"))
        assert said == tuple(f"{value:.2f}" for value in (min(tokens.values()), max(tokens.values()), plain)), tokens


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
