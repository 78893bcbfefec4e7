"""Products of FP8 rows on one GPU, in microseconds. Of few rows each with what makes its rows before it: as the tables
have them, with a launch that rounds rows in between, and with other tiles. --wide: of many rows alone, with each kind
of tiles, and as few rows are multiplied where that goes too.

    python -m tests.bench.fp8_products [--rows 1 4 8] [--tiles]
    python -m tests.bench.fp8_products --wide [--rows 128 256 512 1024]
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deploy.bench.table import table
from workers.layers.kernels.fp8.gemm import fp8_gemm
from workers.layers.kernels.fp8.gemm_wide import fp8_gemm_wide
from workers.layers.kernels.fp8.norm import fp8_rms_norm
from workers.layers.kernels.fp8.rows import Fp8Rows, quantize_rows
from workers.layers.kernels.fp8.tiles import (
    WIDE_TILES,
    Fp8GemmTiles,
    Fp8Matrix,
    Fp8WideTiles,
    fp8_gated_tiles,
    fp8_gemm_tiles,
    fp8_wide_tiles,
    rounding_columns,
)
from workers.layers.kernels.skinny_gemm import Workspace
from workers.ops.norm_triton import rms_norm

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
APART_BYTES = 200 << 20  # of weights that are read between two reads of one, so that no cache has it
STEPS = 48  # in a graph


@dataclass(frozen=True)
class Product:
    """after: what makes the rows, a norm or (attention) what rounds nothing. gated: gates and what they gate, n rows
    together, for a product that reads FP8."""

    name: str
    n: int
    k: int
    after: str = "norm"
    gated: bool = False


PRODUCTS = (
    Product("8B qkv", 6144, 4096),
    Product("8B o", 4096, 4096, after="attention"),
    Product("8B gate and up", 28672, 4096, gated=True),
    Product("8B down", 4096, 14336),
    Product("dsv3 qkv_a", 2112, 7168),
    Product("dsv3 q_b", 3072, 1536),
    Product("dsv3 o", 7168, 2048, after="attention"),
)


def microseconds(step: Callable[[int], None]) -> float:
    """Of one step; best of five runs of a graph of STEPS."""
    for i in range(2):
        step(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(STEPS):
            step(i)
    best = float("inf")
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / STEPS)
    return best


def weights_of(product: Product) -> list[Fp8Matrix]:
    n, k = product.n, product.k
    return [
        Fp8Matrix(
            torch.randn(n, k, device=DEVICE, dtype=BF16).mul_(16).to(torch.float8_e4m3fn),
            torch.rand(-(-n // 64), k // 128, device=DEVICE).mul_(1e-3),
        )
        for _ in range(max(1, min(8, APART_BYTES // (n * k))))
    ]


def measure(product: Product, rows: int, tiles: Fp8GemmTiles, apart: bool) -> float:
    """apart: rows are rounded by a launch of their own, before this product and of a gated one after it."""
    n, k, gated = product.n, product.k, product.gated
    weights, workspace = weights_of(product), Workspace.of_size(1 << 24, 1 << 12, DEVICE)
    x, norm = torch.randn(rows, k, device=DEVICE, dtype=BF16), torch.ones(k, device=DEVICE, dtype=BF16)
    width = n // 2 if gated else n
    out: Tensor | Fp8Rows = torch.empty(rows, width, device=DEVICE, dtype=BF16)
    if gated and tiles.for_fp8:
        out = Fp8Rows.empty(rows, width, True, False, DEVICE)
    made = Fp8Rows.empty(rows, k, True, False, DEVICE)

    def step(i: int) -> None:
        weight = weights[i % len(weights)]
        given: Tensor | Fp8Rows
        if product.after == "norm" and not apart:
            given = fp8_rms_norm(x, None, norm, 1e-5, made)
        else:
            given = rms_norm(x, norm, 1e-5)
            if apart or not rounding_columns(rows, weight, tiles):
                given = quantize_rows(given, True)
        fp8_gemm(given, weight, None, workspace, tiles, out, gated=gated, result=BF16)
        if gated and isinstance(out, Tensor):
            quantize_rows(out, True)

    return microseconds(step)


def others(tiles: Fp8GemmTiles, k: int) -> list[Fp8GemmTiles]:
    """Tiles near those of the table."""
    near = [replace(tiles, ahead=ahead) for ahead in {0, tiles.ahead // 2} if ahead != tiles.ahead]
    near += [replace(tiles, stages=stages) for stages in {3, 4, 6, 8} if stages < tiles.stages]
    if tiles.block_n == 64:
        for splits in (tiles.splits // 2, tiles.splits * 2):
            if 1 <= splits <= 16 and k // 128 % splits == 0 and k // 128 // splits > tiles.ahead:
                near.append(replace(tiles, splits=splits, stages=min(tiles.stages, 6)))
    return near


def wide_lines(product: Product, rows: int) -> list[tuple[object, ...]]:
    """A product of many rows with each kind of tiles, fastest first."""
    n, k, weights = product.n, product.k, weights_of(product)
    workspace = Workspace.of_size(1 << 24, 1 << 12, DEVICE)
    x = quantize_rows(torch.randn(rows, k, device=DEVICE, dtype=BF16), True, rows_together=rows > 128)
    out = torch.empty(rows, n, device=DEVICE, dtype=BF16)
    chosen, few = fp8_wide_tiles(rows, n, k), fp8_gemm_tiles(rows, n, k)

    def wide(tiles: Fp8WideTiles) -> float:
        return microseconds(lambda i: fp8_gemm_wide(x, weights[i % len(weights)], None, workspace, tiles, out))

    def as_few(tiles: Fp8GemmTiles) -> float:
        return microseconds(lambda i: fp8_gemm(x, weights[i % len(weights)], None, workspace, tiles, out))

    found: list[tuple[float, object]] = [] if few is None else [(as_few(few), few)]
    for tiles in WIDE_TILES:
        for splits in (1, 2, 4):
            # of more programs than that no column is shared
            if k // 128 % splits == 0 and (splits == 1 or tiles.count(rows, n) * splits <= 300):
                found.append((wide(replace(tiles, splits=splits)), replace(tiles, splits=splits)))
    found.sort(key=lambda pair: pair[0])
    return [(product.name, rows, us, "table" if tiles == chosen else "", tiles) for us, tiles in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--tiles", action="store_true", help="other tiles too, at the first number of rows")
    parser.add_argument("--wide", action="store_true", help="products of many rows")
    arguments = parser.parse_args()
    lines: list[tuple[object, ...]] = []
    if arguments.wide:
        for product in (product for product in PRODUCTS if not product.gated):
            for rows in arguments.rows or (128, 256, 512, 1024):
                lines += wide_lines(product, rows)
        print("\n".join(table(["product", "rows", "us", "", "tiles"], lines)))
        return
    for product in PRODUCTS:
        for rows in arguments.rows or (1, 4, 8):
            n, k = product.n, product.k
            plain = fp8_gated_tiles(rows, n, k) if product.gated else fp8_gemm_tiles(rows, n, k)
            tiles = fp8_gated_tiles(rows, n, k, for_fp8=True) if product.gated else plain
            assert plain is not None and tiles is not None
            before = measure(product, rows, replace(plain, ahead=0), apart=True)
            lines.append((product.name, rows, before, measure(product, rows, tiles, apart=False), tiles))
            if arguments.tiles and rows == (arguments.rows or (1,))[0]:
                more = [*others(tiles, k), *([plain] if product.gated else [])]
                lines += [(product.name, rows, "", measure(product, rows, one, apart=False), one) for one in more]
    print("\n".join(table(["product", "rows", "rounded apart, us", "us", "tiles"], lines)))


if __name__ == "__main__":
    main()
