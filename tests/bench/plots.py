"""Pictures of `results.jsonl` in docs/. `python -m tests.bench results` writes them; a test fails where they differ."""

from collections.abc import Callable, Sequence
from pathlib import Path

from aerie.deploy.bench.figures import Point, line_plot
from tests.bench.bars import bar_plot
from tests.bench.kernels.linear import BYTES, PRODUCTS
from tests.bench.results import Figure

DOCS = Path(__file__).parents[2] / "docs"
_WEIGHTS = sum(each.n * each.k for each in PRODUCTS if each.name.startswith("8B "))  # of a layer of Llama-3.1-8B
_BYTES = {"int4": _WEIGHTS * BYTES["w4a16"], "bf16": _WEIGHTS * BYTES["bf16"]}
_MAX_ROWS = 64
_TEXTS = ("GSM8K", "MT-Bench", "HumanEval", "JSON")
_DRAFTS = {
    "suffix/15": "copied text, 15",
    "EAGLE-3, 3/1/4": "EAGLE-3, chain of 3",
    "EAGLE-3, 5/4/16": "EAGLE-3, tree of 16",
    "EAGLE-3, 5/4/16+8": "EAGLE-3, tree, copies",
    "DSpark, 8/1/9": "DSpark, chain of 8",
    "DSpark, 8/4/16": "DSpark, tree of 16",
    "EAGLE-3, adaptive": "EAGLE-3, adaptive",
}


def packed_products(found: Sequence[Figure]) -> str:
    """The rate at which products of a layer read their weights, by rows, beside the rate of a copy."""
    figures = [each for each in found if each.place[0] == "4-bit products, us an 8B layer"]
    rates: dict[str, list[Point]] = {}
    for figure in figures:
        _, weights, column = figure.place
        if weights in _BYTES and (rows := int(column.split()[0])) <= _MAX_ROWS:
            rates.setdefault(weights, []).append(Point(rows, _BYTES[weights] / figure.value * 1e-3))
    floors = [figure.floor for figure in figures if figure.floor is not None]
    copy = _BYTES["int4"] / min(floors) * 1e-3
    rates["a copy"] = [Point(1, copy), Point(_MAX_ROWS, copy)]
    return line_plot("Products of a layer of Llama-3.1-8B, H200", "rows", "GB/s of weights", rates)


def drafts_by_text(found: Sequence[Figure]) -> str:
    """Tokens a round of the embedded pair, by text and draft."""
    values = {each.place[1:]: each.value for each in found if each.place[0] == "Tokens a round, by draft and text"}
    groups = {text: {name: values[row, text] for row, name in _DRAFTS.items()} for text in _TEXTS}
    return bar_plot("Drafts of the embedded pair, batch 1", "tokens a round", groups)


PLOTS: dict[str, Callable[[Sequence[Figure]], str]] = {
    "4-bit-products.svg": packed_products,
    "drafts-by-text.svg": drafts_by_text,
}


def write(found: Sequence[Figure]) -> None:
    for name, plot in PLOTS.items():
        (DOCS / name).write_text(plot(found))
