"""Linear layers of few and many rows on a GPU, by how their weights are stored.

    python -m tests.bench linear [--weights bf16 fp8 w4a16] [--rows 1 4 8 32 64 128 256 512]

Microseconds per product, by the kernels that a layer takes for this weight and this number of rows. Rows come in
bfloat16: rounding them to FP8 is included. A CUDA graph holds products with several weights, so that no cache has them.
floor: the weight's bytes over the rate of a copy, measured in the same turns. Markdown tables, the second with the
products of a layer of Llama-3.1-8B together, and the rate at which weights are read; then one JSON line.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from aerie.deploy.bench.figures import table
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.span import Span
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, UnquantizedLinearMethod
from aerie.workers.quantization.floats import FloatQuant, block_scheme
from aerie.workers.quantization.table import read_quant_method
from tests.bench.kernels.gpu_time import Clock, captured, hardware
from tests.bench.machine import commit
from tests.bench.round import QUANTIZATIONS

ROWS = (1, 4, 8, 32, 64, 128, 256, 512)
APART_BYTES = 400 << 20  # of weights, between two products with the same one
MAX_WEIGHTS = 16


@dataclass(frozen=True)
class Product:
    """A weight [n, k]. gated: gate above up projections, whose product is silu(gate) * up, [rows, n / 2]."""

    name: str
    n: int
    k: int
    gated: bool = False


PRODUCTS = (
    Product("8B qkv", 6144, 4096),
    Product("8B o", 4096, 4096),
    Product("8B gate and up", 28672, 4096, gated=True),
    Product("8B down", 4096, 14336),
    Product("dsv3-rank qkv_a", 2112, 7168),
    Product("dsv3-rank q_b", 3072, 1536),
    Product("dsv3-rank o", 7168, 2048),
)
W4A16 = read_quant_method({"quantization_config": QUANTIZATIONS["w4a16"]}, "w4a16")
METHODS: dict[str, Callable[[LinearShape], LinearMethod]] = {
    "bf16": UnquantizedLinearMethod,
    "fp8": lambda shape: FloatQuant(block_scheme((128, 128))).linear_method(["weight"], shape),
    "w4a16": lambda shape: W4A16.linear_method(["weight"], shape),
}
BYTES = {"bf16": 2.0, "fp8": 1.0, "w4a16": 0.5 + 2 / 128}  # of a number and its scale


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    product: str
    weights: str
    rows: int
    us: float
    floor_us: float


def layers_of(product: Product, weights: str, device: torch.device) -> list[LinearMethod]:
    """Layers with random weights, enough that reading all of them empties the caches."""
    count = max(1, min(MAX_WEIGHTS, int(APART_BYTES / (product.n * product.k * BYTES[weights]))))
    generator = torch.Generator(device).manual_seed(0)
    options = GEMMOptions(Workspace.allocate(1 << 24, 1 << 12, device), fp8=True, packed=True)
    shape = LinearShape.stacked([("", Span.whole(product.n))], Span.whole(product.k))
    layers = []
    with device:
        for _ in range(count):
            layer = METHODS[weights](shape).to(device)
            layer.fill_dummy(generator)
            layer.finish(options)
            layers.append(layer)
    return layers


def measure(clock: Clock, product: Product, weights: str, all_rows: list[int]) -> list[Row]:
    """A row of the table for each number of rows."""
    layers = layers_of(product, weights, clock.source.device)
    found = []
    for rows in all_rows:
        x = torch.randn(rows, product.k, device=clock.source.device, dtype=torch.bfloat16)

        def run(x: torch.Tensor = x) -> None:
            for layer in layers:
                layer.multiply_gated(x) if product.gated else layer.multiply(x, None)

        (us,), rate = clock.medians(captured(run).replay)
        floor = product.n * product.k * BYTES[weights] / rate * 1e6
        found.append(Row(product.name, weights, rows, round(us / len(layers), 2), round(floor, 2)))
    return found


def layers_together(found: list[Row]) -> list[tuple[object, ...]]:
    """Return by weights and rows: us of an 8B layer's products, TB/s of weights, and its share of a copy's."""
    sums: dict[tuple[str, int], list[Row]] = {}
    for row in found:
        if row.product.startswith("8B "):
            sums.setdefault((row.weights, row.rows), []).append(row)
    sizes = {product.name: product.n * product.k for product in PRODUCTS}
    lines: list[tuple[object, ...]] = []
    for (weights, rows), parts in sums.items():
        us, floor_us = sum(part.us for part in parts), sum(part.floor_us for part in parts)
        num_bytes = sum(sizes[part.product] for part in parts) * BYTES[weights]
        lines.append((weights, rows, round(us, 1), round(num_bytes / us / 1e6, 2), f"{100 * floor_us / us:.0f} %"))
    return lines


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    clock, found = Clock(args.rounds), list[Row]()
    for product in PRODUCTS:
        for weights in args.weights:
            found += measure(clock, product, weights, args.rows)
    head = ["product", "weights", "rows", "us", "floor, us"]
    print(*table(head, [tuple(asdict(row).values()) for row in found]), sep="\n")
    print(*table(["weights", "rows", "us an 8B layer", "TB/s", "of a copy"], layers_together(found)), sep="\n")
    results = [asdict(row) for row in found]
    print(json.dumps({"bench": "linear", "hardware": hardware(), "commit": commit(), "results": results}))


if __name__ == "__main__":
    main()
