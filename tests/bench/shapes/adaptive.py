"""Adaptive tree shapes against each static shape, and against an engine without a draft.

    python -m tests.bench adaptive [--model llama-3.1-8b] [--shapes chain tree] [--batches 1 4 16 32 64 128 256]
                                   [--contexts 1024 8192 32768] [--acceptances 1.3 2 3 4.5] [--tiny]

Engines with dummy weights (`--model qwen3.5-35b-a3b`, qwen3.5-27b: hybrids with their own module) and synthetic
acceptance (where a shape is not deep enough for it, as much as it holds), the scheduler in this process, costs as the
start measures them. A cell is a number of requests that all run, with distinct prompts of one length; each shape is
forced for some steps, then the scheduler chooses, which first has as many steps to learn what is accepted, of requests
that end then, so that all arms are measured at the same lengths; the better of two passes counts for each. Cells that
`--pool-tokens` do not hold are left out.
Tokens per millisecond, what the choice reaches of the best shape, of plain rounds and of no draft at all, and which
shapes it ran. A Markdown table, then one JSON line. Needs a GPU for figures that mean anything; `--tiny` tries it on a
CPU, in one thread.
"""

import argparse
import gc
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, RoundShapes, SchedulerConfig, WorkerConfig
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from aerie.workers.scheduling.shapes.shape_choice import ShapeChoice
from tests.bench.models import hybrids
from tests.bench.prompts import random_prompts
from tests.bench.round import add_engine_options, commit, drafted_by, hardware, model_of, write_checkpoints

TREES = {"chain": (3, 1, 4), "tree": (5, 4, 16)}
PAGE_SIZE = 16
PASSES = 2
SETTLING = 20  # steps of a forced shape before those that are measured


@dataclass(frozen=True)
class Cell:
    """tokens_per_ms: by arm. chosen: steps of each shape while the choice was measured."""

    shapes: str
    acceptance: float
    batch: int
    context: int
    tokens_per_ms: dict[str, float]
    chosen: dict[str, int]

    @property
    def best(self) -> float:
        return max(rate for arm, rate in self.tokens_per_ms.items() if arm not in ("none", "adaptive"))

    def of(self, rate: float) -> float:
        """Return what the choice reaches of a rate."""
        return self.tokens_per_ms["adaptive"] / rate


def engine_spec(folder: Path, shapes: str | None, acceptance: float, arguments: argparse.Namespace) -> EngineSpec:
    """shapes: None has no draft."""
    most = max(arguments.batches)
    max_len = max(arguments.contexts) + room(arguments.steps)
    worker = WorkerConfig(
        ModelSource(path=str(folder / "target"), load_format="dummy", max_model_len=max_len),
        CacheConfig(PAGE_SIZE, num_pages=arguments.pool_tokens // PAGE_SIZE),
        SchedulerConfig(max_running=most, max_step_tokens=64 if arguments.tiny else 8192),
    )
    if shapes is None:
        return EngineSpec(worker)
    draft = SpeculativeConfig(
        *drafted_by(folder), *TREES[shapes], synthetic_acceptance_length=acceptance, adaptive=True
    )
    return EngineSpec(worker, draft)


def room(num_steps: int) -> int:
    """Tokens that a request may emit in an arm, and a margin for what rounds write after them."""
    return 6 * (num_steps + SETTLING + 8) + 256


def tokens_per_ms(engine: LocalEngine, prompts: Sequence[list[int]], settling: int, num_steps: int) -> float:
    """Tokens per millisecond of steps in which all requests run rounds, after `settling` steps."""
    scheduler = engine.scheduler
    names = [f"r{i}" for i in range(len(prompts))]
    tokens = room(num_steps)
    for name, prompt in zip(names, prompts, strict=True):
        scheduler.submit(Request(name, prompt, SamplingParams(tokens, 0.0)))
    while scheduler.num_waiting or scheduler.queues.prefilling:
        engine.step()
    for _ in range(settling):
        engine.step()
    before, started_s = scheduler.stats.generation_tokens, time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    elapsed_s = time.perf_counter() - started_s
    rate = (scheduler.stats.generation_tokens - before) / elapsed_s / 1e3
    for name in names:
        assert scheduler.abort(name) is not None, "a request ended while it was measured"
    while engine.executor.num_pending:
        scheduler.apply(engine.executor.take())
    return rate


def forced(engine: LocalEngine, shape: int | None) -> None:
    """From now on all rounds have this shape; None: the scheduler chooses."""
    choose: Callable[[RoundShapes], int] | None = None if shape is None else lambda shapes: shape
    engine.scheduler.rounds.choose_shape = choose


def measure(engine: LocalEngine, prompts: list[list[int]], num_steps: int) -> tuple[dict[str, float], dict[str, int]]:
    """Rates of every shape and of the choice, and what it chose. All arms find the prompts in the prefix cache: while
    long ones are computed the first requests would come to their end."""
    scheduler = engine.scheduler
    shapes = scheduler._shapes
    found: dict[str, float] = {}
    chosen: Counter[str] = Counter()

    def better(name: str, rate: float) -> None:
        found[name] = max(rate, found.get(name, 0.0))

    engine.generate(prompts, SamplingParams(1, 0.0), len(prompts))
    # a new choice in the same object, because the planner of rounds and the results both refer to it
    vars(scheduler.shape_choice).update(vars(ShapeChoice(shapes, scheduler._config.num_slots)))
    for _ in range(PASSES):
        for index, shape in enumerate(shapes.shapes):
            forced(engine, index)
            better(shape.name, tokens_per_ms(engine, prompts, SETTLING, num_steps))
        if shapes.default:
            forced(engine, None)
            tokens_per_ms(engine, prompts, 0, num_steps)
            before = Counter(scheduler.stats.steps_by_shape)
            better("adaptive", tokens_per_ms(engine, prompts, SETTLING, num_steps))
            chosen += Counter(scheduler.stats.steps_by_shape) - before
            assert scheduler.shape_choice.expected, "the steps had another choice"
    scheduler.flush_prefix_cache()
    return found, dict(chosen)


def run(arguments: argparse.Namespace) -> list[Cell]:
    cells: list[Cell] = []
    grid = [
        (batch, context)
        for batch in arguments.batches
        for context in arguments.contexts
        if batch * (context + room(arguments.steps)) <= arguments.pool_tokens
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        longest = max(arguments.contexts) + room(arguments.steps)
        write_checkpoints(folder, model_of(arguments), max_position=2 * longest)
        none = [rates["plain"] for rates, _ in of_engine(engine_spec(folder, None, 1.0, arguments), grid, arguments)]
        for shapes in arguments.shapes:
            for wanted in arguments.acceptances:
                acceptance = min(wanted, TREES[shapes][0] + 1)
                found = of_engine(engine_spec(folder, shapes, acceptance, arguments), grid, arguments)
                for (batch, context), plain, (rates, chosen) in zip(grid, none, found, strict=True):
                    rates["none"] = plain
                    cells.append(Cell(shapes, acceptance, batch, context, rates, chosen))
                    print(row(cells[-1]), flush=True)
    return cells


def of_engine(
    spec: EngineSpec, grid: Sequence[tuple[int, int]], arguments: argparse.Namespace
) -> Iterator[tuple[dict[str, float], dict[str, int]]]:
    """`measure` of each cell. The engine's memory is free again afterwards: the next one wants as much."""
    try:
        with local_engine(spec) as engine:
            for batch, context in grid:
                prompts = random_prompts(spec.worker.model, batch, context, seed=batch)
                yield measure(engine, prompts, arguments.steps)
    finally:
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def row(cell: Cell) -> str:
    rates = ", ".join(f"{arm} {rate:.4g}" for arm, rate in cell.tokens_per_ms.items())
    chosen = ", ".join(f"{shape} {count}" for shape, count in sorted(cell.chosen.items()))
    plain, none = cell.tokens_per_ms["plain"], cell.tokens_per_ms["none"]
    return (
        f"| {cell.shapes} | {cell.acceptance:g} | {cell.batch} | {cell.context} | {rates} | {cell.of(cell.best):.3f} | "
        f"{cell.of(plain):.3f} | {cell.of(none):.3f} | {chosen} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, list(TREES), [1, 4, 16, 32, 64, 128, 256], hybrids.CONFIGS)
    parser.set_defaults(shapes=list(TREES))
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192, 32768])
    parser.add_argument("--acceptances", nargs="+", type=float, default=[1.3, 2.0, 3.0, 4.5])
    parser.add_argument("--steps", type=int, default=200, help="steps that are measured per arm and pass")
    parser.add_argument("--pool-tokens", type=int, default=700_000, help="KV tokens of the pool: 131 KB each, of 8B")
    arguments = parser.parse_args()
    if arguments.tiny:
        torch.set_num_threads(1)
        arguments.batches, arguments.contexts, arguments.acceptances = [1, 3], [48], [3.0]
        arguments.steps, arguments.pool_tokens = 10, 8192
    cells = run(arguments)
    print("\n| shapes | acceptance | batch | context | tokens/ms | of the best | of plain | of none | steps |")
    print("| --- " * 9 + "|")
    for cell in cells:
        print(row(cell))
    low = min(cell.of(cell.best) for cell in cells)
    print(f"\nlowest of the best shape: {low:.3f}, of plain rounds: "
          f"{min(cell.of(cell.tokens_per_ms['plain']) for cell in cells):.3f}")  # fmt: skip
    print(
        json.dumps(
            {
                "bench": "adaptive",
                "hardware": hardware(),
                "commit": commit(),
                "model": arguments.model,
                "steps": arguments.steps,
                "cells": [asdict(cell) for cell in cells],
            }
        )
    )


if __name__ == "__main__":
    main()
