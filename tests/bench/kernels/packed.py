"""Products of 1 to 64 rows with weights of 4 bits on a GPU, in several tilings.

    python -m tests.bench packed [--rows 1 4 8 12 16 24 32 48 64] [--variants NAME ...] [--shapes NAME ...]

GB/s at which codes and scales are read, by rows, for the matrices of a layer of Llama-3.1-8B in groups of 128: the
product that a layer takes today, other tiles of `aerie.kernels.packed.blocks_triton`, and the bf16 product (GB/s of
its weight, which is four times larger), beside a copy. A CUDA graph holds products with several weights, so that no
cache has them. Every result is compared with the product of the dequantised weight.

Processes with the GPU compile the kernels before. The last tables have the microseconds of a layer by variant, and the
best variant by shape and rows; then one JSON line.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import Tensor

from aerie.deploy.bench.figures import table
from aerie.kernels.gemm.blocks import cdiv, next_power_of_2
from aerie.kernels.gemm.workspace import GEMMOptions, Workspace
from aerie.kernels.norm.norm import silu_mul
from aerie.kernels.packed.blocks_triton import packed_blocks
from aerie.kernels.packed.product import choose_product
from aerie.kernels.packed.product_triton import order_rows
from aerie.kernels.packed.tiles import BlockPlan, BlockTiles, packed_workspace_size
from aerie.kernels.packed.weight import PackedWeight, dequantize, empty
from tests.bench.kernels.gpu_time import Clock, captured, hardware
from tests.bench.kernels.linear import PRODUCTS, Product, layers_of
from tests.bench.machine import commit

VARIANTS: dict[str, BlockPlan] = {
    "64 outputs, 2 a processor": BlockPlan(False, 240),
    "64 outputs, 4 a processor": BlockPlan(False, 480),
    "128 outputs, 2 a processor": BlockPlan(True, 240),
    "128 outputs, 4 a processor": BlockPlan(True, 480),
    "128 outputs, ordered rows": BlockPlan(True, 240, max_direct_rows=0),
}
ROWS = (1, 4, 8, 12, 16, 24, 32, 48, 64)
SHAPES = {product.name: product for product in PRODUCTS if product.name.startswith("8B ")}
GROUP = 128
MAX_ERROR = 1e-2  # of the result's norm; today's products of many rows have 4e-3
_APART_BYTES = 400 << 20
_MAX_PROCESSES = 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


TODAY, BF16 = "today", "bf16"


def weight_of(product: Product) -> PackedWeight:
    """Random codes, scales of which results are about as large as rows."""
    weight = empty(product.n, product.k, GROUP, "int4", DEVICE, torch.bfloat16, False, False)
    weight.codes.random_(-(1 << 31), (1 << 31) - 1)
    weight.scales.uniform_(0.1 * product.k**-0.5, 0.3 * product.k**-0.5)
    return weight


def workspace_of(product: Product) -> Workspace:
    """Partial sums and tickets of every variant."""
    cells, tickets = packed_workspace_size([(product.n, product.k)])
    for plan in VARIANTS.values():
        tiles = plan.tiles(64, product.n, product.k, product.gated)
        if tiles is not None:
            cells, tickets = max(cells, tiles.part_cells(64, product.n)), max(tickets, cdiv(product.n, 64))
    return Workspace.allocate(cells, tickets, DEVICE)


Multiply = Callable[[Tensor, PackedWeight], Tensor]


def multiply_of(name: str, product: Product, workspace: Workspace, rows: int) -> Multiply | None:
    """Return the product of a variant; None if it has none."""
    if name == TODAY:

        def today(x: Tensor, weight: PackedWeight) -> Tensor:
            ours = choose_product(weight, GEMMOptions(workspace, packed=True))
            return ours.multiply_gated(x) if product.gated else ours.multiply(x, None)

        return today
    tiles = VARIANTS[name].tiles(rows, product.n, product.k, product.gated)
    if tiles is None:
        return None

    def blocks(x: Tensor, weight: PackedWeight, tiles: BlockTiles = tiles) -> Tensor:
        out = x.new_empty((rows, product.n // (1 + product.gated)))
        ordered = x if tiles.direct else order_rows(x)
        return packed_blocks(ordered, weight, None, workspace, tiles, out, gated=product.gated)

    return blocks


def rows_of(product: Product, rows: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(rows)
    return torch.randn(rows, product.k, generator=generator, device=DEVICE).bfloat16()


@torch.inference_mode()
def compile_kernels(shape: str, name: str, rows: int) -> str:
    """Run a product once, in a process of its own, so that Triton's cache has its kernels; return the error or ""."""
    torch.set_default_dtype(torch.bfloat16)
    product = SHAPES[shape]
    try:
        x = rows_of(product, rows)
        if name == BF16:
            layer = layers_of(product, "bf16", DEVICE)[0]
            layer.multiply_gated(x) if product.gated else layer.multiply(x, None)
        elif (multiply := multiply_of(name, product, workspace_of(product), rows)) is not None:
            multiply(x, weight_of(product))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{shape}, {name}: {type(error).__name__}: {str(error)[:300]}"
    return ""


def compile_all(shapes: Sequence[str], names: Sequence[str], all_rows: Sequence[int]) -> None:
    """Compile the kernels of these products in processes, for one number of rows of each size of tiles."""
    buckets = {max(8, next_power_of_2(rows)): rows for rows in all_rows}.values()
    processes = min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(compile_kernels, shape, name, rows)
            for rows in buckets
            for shape in shapes
            for name in (*names, BF16)
        ]
        for problem in filter(None, (job.result() for job in jobs)):
            print("not compiled:", problem, flush=True)


def errors_of(multiply: Multiply, product: Product, weight: PackedWeight, dense: Tensor, rows: int) -> float:
    """Return the relative error against the product with the dequantised weight in float32."""
    x = rows_of(product, rows)
    expected = x.float() @ dense.T
    if product.gated:
        expected = silu_mul(expected)
    return float((multiply(x, weight).float() - expected).norm() / expected.norm())


@torch.inference_mode()
def measure(clock: Clock, product: Product, names: Sequence[str], all_rows: Sequence[int]) -> list[dict[str, object]]:
    """Return a result for each variant and number of rows; variants take turns with a copy."""
    num_bytes = weight_of(product).num_bytes
    weights = [weight_of(product) for _ in range(max(2, min(16, _APART_BYTES // num_bytes)))]
    workspace, dense = workspace_of(product), dequantize(weights[0], torch.float32)
    wide = layers_of(product, "bf16", DEVICE) if DEVICE.type == "cuda" else []
    results: list[dict[str, object]] = []
    for rows in all_rows:
        x, runs, errors = rows_of(product, rows), dict[str, Callable[[], object]](), dict[str, str]()
        for name in names:
            multiply = multiply_of(name, product, workspace, rows)
            if multiply is None:
                continue
            try:
                error = errors_of(multiply, product, weights[0], dense, rows)

                def run(multiply: Multiply = multiply, x: Tensor = x) -> None:
                    for weight in weights:
                        multiply(x, weight)

                runs[name], errors[name] = captured(run).replay, f"{error:.1e}"
                if not error < MAX_ERROR:
                    errors[name] += " WRONG"
            except Exception as error:
                print(f"{product.name}, {name}, {rows} rows: {type(error).__name__}: {str(error)[:200]}", flush=True)
        if wide:

            def all_wide(x: Tensor = x) -> None:
                for layer in wide:
                    layer.multiply_gated(x) if product.gated else layer.multiply(x, None)

            runs[BF16] = captured(all_wide).replay
        times, rate = clock.medians(*runs.values())
        for name, total in zip(runs, times, strict=True):
            us = total / (len(wide) if name == BF16 else len(weights))
            read = product.n * product.k * 2 if name == BF16 else num_bytes
            found = {"shape": product.name, "rows": rows, "variant": name, "us": round(us, 2)}
            found |= {"gbs": round(read / us / 1e3), "of_copy": round(read / us * 1e6 / rate, 3)}
            results.append(found | {"error": errors.get(name, "")})
    return results


def print_tables(results: Sequence[dict[str, object]], names: Sequence[str], all_rows: Sequence[int]) -> None:
    """Print GB/s by shape, microseconds of a layer, and the best variant."""
    by = {(r["shape"], r["variant"], r["rows"]): r for r in results}
    shapes = list(dict.fromkeys(str(r["shape"]) for r in results))
    head = [f"{rows} rows" for rows in all_rows]
    for shape in shapes:
        print(f"\n{shape}: GB/s (share of a copy)")
        lines = []
        for name in (*names, BF16):
            cells = [by.get((shape, name, rows)) for rows in all_rows]
            lines.append((name, *(f"{c['gbs']} ({c['of_copy']})" if c else "-" for c in cells)))
        print(*table(["variant", *head], lines), sep="\n")
    print("\nus of a layer's products (shapes without the variant: today's)")
    lines = []
    for name in (*names, BF16):
        sums = [
            sum(float(str((by.get((s, name, r)) or by.get((s, TODAY, r)) or {"us": "nan"})["us"])) for s in shapes)
            for r in all_rows
        ]
        lines.append((name, *(f"{value:.1f}" for value in sums)))
    best = [[min((by[s, n, r] for n in names if (s, n, r) in by), key=_us) for s in shapes] for r in all_rows]
    lines.append(("best of each", *(f"{sum(_us(each) for each in row):.1f}" for row in best)))
    print(*table(["variant", *head], lines), sep="\n")
    print("\nbest variant (us)")
    lines = [(s, *(f"{row[i]['variant']} ({row[i]['us']})" for row in best)) for i, s in enumerate(shapes)]
    print(*table(["shape", *head], lines), sep="\n", flush=True)


def _us(result: dict[str, object]) -> float:
    return float(str(result["us"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    names, began_s = [TODAY, *args.variants], time.perf_counter()
    if DEVICE.type == "cuda":
        compile_all(args.shapes, names, args.rows)
        print(f"compiled in {time.perf_counter() - began_s:.0f} s", flush=True)
    clock, results = Clock(args.rounds), list[dict[str, object]]()
    for shape in args.shapes:
        results += measure(clock, SHAPES[shape], names, args.rows)
    print_tables(results, names, args.rows)
    print(f"{time.perf_counter() - began_s:.0f} s in all")
    whole = {"bench": "packed", "hardware": hardware(), "commit": commit(), "results": results}
    print(json.dumps(whole), flush=True)


if __name__ == "__main__":
    main()
