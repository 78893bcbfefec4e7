"""Other tiles for experts than the tables', for whoever sets those: `python -m tests.bench.experts --sweep`.

Each of the two products is timed alone with each of its candidates, and printed, fastest first; then routing and both
products with the tables' tiles, with the pairs whose sums were least, and of few rows with others that may share a
multiprocessor, since the second product begins while the first ends. Tiles go together that have the same rows, and
inner activations with scales of as many columns. Candidates are compiled by several processes first.
"""

import dataclasses
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tests.bench.attention import Clock
from tests.bench.experts import MODELS, Layer, Pass, sizes_of, table
from tests.bench.gpu_time import captured
from workers.layers.kernels.experts.tall_blocks import MIN_ROWS as TALL
from workers.layers.kernels.experts.weights import MAX_FEW_ROWS, ExpertSizes, ExpertTiles, ProductTiles

PAIRS = 3  # of products that are timed together


@dataclass(frozen=True)
class Case:
    """part: "gates", "downs" or "experts", of `Pass`. key: products with the same one go together."""

    rows: int
    part: str
    tiles: ExpertTiles

    @property
    def key(self) -> tuple[int, int]:
        return self.tiles.block_m, self.tiles.gate_up.block_n

    def __str__(self) -> str:
        gate, down = (dataclasses.astuple(product) for product in (self.tiles.gate_up, self.tiles.down))
        each = {"gates": f"gate_up {gate}", "downs": f"down {down}"}
        product = each.get(self.part, f"gate_up {gate} down {down}")
        return f"m {self.tiles.block_m} inner {self.tiles.gate_up.block_n} {product}"


def candidates(rows: int, sizes: ExpertSizes) -> Iterator[Case]:
    own = table(rows, sizes)
    for block_m in _block_sizes(rows, own.block_m):
        for gate_up in _few_gates(sizes) if rows <= MAX_FEW_ROWS else _many_gates(block_m):
            yield Case(rows, "gates", replace(own, block_m=block_m, gate_up=gate_up))
        for inner in (64, 128):
            gate_up = own.gate_up if own.gate_up.block_n == inner else replace(own.gate_up, block_n=inner, warps=8)
            downs = _few_downs(rows) if rows <= MAX_FEW_ROWS else _many_downs(block_m, sizes)
            for down in downs:
                yield Case(rows, "downs", ExpertTiles(block_m, gate_up, down))


def beside_each_other(rows: int, sizes: ExpertSizes) -> Iterator[Case]:
    """Of few rows: what both products keep on their way together is a multiprocessor's shared memory at most."""
    own = table(rows, sizes)
    downs = [ProductTiles(128, splits, stages, 8) for splits in (2, 3, 4, 6, 8) for stages in (2, 3, 4)]
    if own.down.ahead:
        downs += [own.down, replace(own.down, warps=4)]
    for stages in (2, 3, 4):
        for down in downs:
            yield Case(rows, "experts", replace(own, gate_up=replace(own.gate_up, stages=stages), down=down))


def _block_sizes(rows: int, own: int) -> Sequence[int]:
    return [own] if rows <= MAX_FEW_ROWS else sorted({max(16, own // 2), own, min(128, own * 2)})


def _few_gates(sizes: ExpertSizes) -> Iterator[ProductTiles]:
    steps = sizes.size // sizes.step
    for splits in (d for d in (1, 2, 4, 7, 8, 14) if steps % d == 0):
        for stages in (3, 4):
            yield ProductTiles(128, splits, stages, 8)
            yield ProductTiles(64, splits, stages + 1, 4)


def _few_downs(rows: int) -> Iterator[ProductTiles]:
    for splits in (2, 4, 8):
        for stages in (5, 8):
            yield ProductTiles(64, splits, stages, 4)
        for stages, warps in ((4, 4), (4, 8), (6, 8)):
            yield ProductTiles(128, splits, stages, warps)


def _many_gates(block_m: int) -> Iterator[ProductTiles]:
    wide = (4, 8) if block_m <= TALL else (8,)
    for stages in (2, 3, 4, 5):
        for warps in wide:
            yield ProductTiles(64, 1, stages, warps)
        yield ProductTiles(128, 1, stages, 8)


def _many_downs(block_m: int, sizes: ExpertSizes) -> Iterator[ProductTiles]:
    all_blocks, all_stages = ((4, 8, 16), (2, 3)) if block_m >= TALL else ((1, 8, 16, 28), (3, 4))
    for block_n, warps in ((64, 4), (64, 8), (128, 4), (128, 8)):
        for blocks in (n for n in all_blocks if sizes.size // block_n % n == 0):
            for stages in all_stages:
                yield ProductTiles(block_n, 1, stages, warps, blocks)


def try_cases(arguments: tuple[str, list[Case]]) -> list[Case]:
    """Of a process that compiles: those that run."""
    name, cases = arguments
    layers, found = [Layer(MODELS[name], 0)], []
    for case in cases:
        try:
            one = Pass(layers, case.rows, case.tiles)
            one.prepare()
            getattr(one, case.part)()
            torch.cuda.synchronize()
            found.append(case)
        except Exception as error:  # a candidate that does not fit is a result too
            print(f"{case.rows} rows, {case}: {type(error).__name__} {str(error)[:100]}", flush=True)
    return found


def sweep(clock: Clock, name: str, layers: Sequence[Layer], all_rows: Sequence[int]) -> list[dict[str, object]]:
    sizes = sizes_of(MODELS[name])
    cases = [case for rows in all_rows for case in dict.fromkeys(candidates(rows, sizes))]
    cases += [case for rows in all_rows if rows <= MAX_FEW_ROWS for case in beside_each_other(rows, sizes)]
    processes = max(1, min(12, (os.cpu_count() or 2) - 2))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        parts = pool.map(try_cases, [(name, cases[i::processes]) for i in range(processes)])
    runs = {case for part in parts for case in part}
    results: list[dict[str, object]] = []
    for rows in all_rows:
        times: dict[str, dict[Case, float]] = {}
        for part in ("gates", "downs"):
            fitting = [case for case in cases if case.rows == rows and case.part == part and case in runs]
            times[part] = timed(clock, layers, fitting)
        together = [Case(rows, "experts", table(rows, sizes)), *best_pairs(rows, times["gates"], times["downs"])]
        together += [case for case in cases if case.rows == rows and case.part == "experts" and case in runs]
        times["experts"] = timed(clock, layers, list(dict.fromkeys(together)))
        for part, found in times.items():
            for case, us in sorted(found.items(), key=lambda pair: pair[1]):
                mark = "table" if case == together[0] else ""
                print(f"{rows:5} {part:7} {us:8.2f} us {case} {mark}", flush=True)
                results.append({"rows": rows, "part": part, "us": round(us, 2), **dataclasses.asdict(case.tiles)})
    return results


def timed(clock: Clock, layers: Sequence[Layer], cases: Sequence[Case]) -> dict[Case, float]:
    """Microseconds per layer."""
    passes = [Pass(layers, case.rows, case.tiles) for case in cases]  # their graphs read what they hold
    runs = []
    for case, one in zip(cases, passes, strict=True):
        one.prepare()
        runs.append(captured(getattr(one, case.part)).replay)
    *times, _ = clock.medians(*runs)
    return {case: time / len(layers) for case, time in zip(cases, times, strict=True)}


def best_pairs(rows: int, gates: dict[Case, float], downs: dict[Case, float]) -> list[Case]:
    """The fastest of each product of each key, those with the least sums."""
    pairs: list[tuple[float, Case]] = []
    for key in {case.key for case in gates} & {case.key for case in downs}:
        gate, down = (
            min(((us, case) for case, us in found.items() if case.key == key), key=lambda pair: pair[0])
            for found in (gates, downs)
        )
        tiles = replace(gate[1].tiles, down=down[1].tiles.down)
        pairs.append((gate[0] + down[0], Case(rows, "experts", tiles)))
    return [case for _, case in sorted(pairs, key=lambda pair: pair[0])[:PAIRS]]
