"""Pictures of `results.jsonl` in docs/. `python -m tests.bench results` writes them; a test fails where they differ."""

from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.bench.plot import Point, line_plot
from tests.bench.kernels.linear import BYTES, PRODUCTS
from tests.bench.results import Figure

DOCS = Path(__file__).parents[2] / "docs"
_WEIGHTS = sum(each.n * each.k for each in PRODUCTS if each.name.startswith("8B "))  # of a layer of Llama-3.1-8B
_BYTES = {"int4": _WEIGHTS * BYTES["w4a16"], "bf16": _WEIGHTS * BYTES["bf16"]}
_MAX_ROWS = 64


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


PLOTS: dict[str, Callable[[Sequence[Figure]], str]] = {"4-bit-products.svg": packed_products}


def write(found: Sequence[Figure]) -> None:
    for name, plot in PLOTS.items():
        (DOCS / name).write_text(plot(found))
