"""What steps cost, as an engine measures it at its start and its scheduler reads it.

    python -m tests.bench.costs [--model llama-3.1-8b] [--shapes chain] [--batches 64] [--tensor-parallel 1] [--tiny]

An engine per shape and largest batch, with dummy weights, as `tests.bench.round` makes them, but with a pool of 2^17
tokens and contexts up to 8192. Tables: milliseconds of a round by batch size and what KV adds; milliseconds of a step
by prompt tokens and requests beside them. Markdown, then one JSON line, whose `table` is a
`workers.scheduling.cost_table.CostTable` (`msgspec.convert(table, CostTable)`). Needs a GPU for figures that mean
anything; `--tiny` tries it on a CPU, in one thread.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch

from attention.config import CacheConfig
from speculative.build import EngineSpec, build_worker, plan_layout
from speculative.local import local_engine
from tests.bench.round import (
    Setting,
    add_engine_options,
    commit,
    engine_spec,
    hardware,
    model_of,
    write_checkpoints,
)
from workers.config import RoundShapes
from workers.scheduling.cost_table import CostTable, default_itl_target_ms

POOL_TOKENS = 1 << 17
MAX_MODEL_LEN = 8192


def with_long_contexts(spec: EngineSpec) -> EngineSpec:
    """The engine with room for the contexts that the probe reads, whatever its batch."""
    cache = CacheConfig(spec.worker.cache.page_size, num_pages=POOL_TOKENS // spec.worker.cache.page_size)
    model = dataclasses.replace(spec.worker.model, max_model_len=MAX_MODEL_LEN)
    return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, cache=cache, model=model))


def measure(spec: EngineSpec) -> tuple[CostTable, RoundShapes, dict[str, float]]:
    """The table of one engine, and seconds of each phase of its start; of several ranks only the whole start's."""
    layout, phases = plan_layout(spec), dict[str, float]()
    started_s = time.perf_counter()
    if spec.worker.tensor_parallel == 1:
        costs = build_worker(spec, layout, 0, "", phases.__setitem__).costs
    else:
        with local_engine(spec) as engine:
            costs = engine.executor.costs
    phases["whole"] = time.perf_counter() - started_s
    assert costs is not None
    return costs, layout.shapes, phases


def show(name: str, batch: int, costs: CostTable, shapes: RoundShapes) -> None:
    """Both tables of one engine."""
    for shape, rounds in zip(shapes.shapes, costs.rounds, strict=True):
        print(f"\n| {name}, max_running {batch}: rounds of {shape.name} | " + _cells(rounds.num_requests))
        print("| --- |" + " --- |" * len(rounds.num_requests))
        print("| ms | " + _cells(f"{ms:.2f}" for ms in rounds.ms))
        print("| us per 1000 KV tokens | " + _cells(f"{ms * 1e6:.1f}" for ms in rounds.ms_per_kv_token))
    print("\n| ms of steps beside, by prompt tokens | " + _cells(costs.chunk_tokens))
    print("| --- |" + " --- |" * len(costs.chunk_tokens))
    for requests, row in zip(costs.chunk_requests, costs.chunk_ms, strict=True):
        print(f"| {requests} | " + _cells(f"{ms:.1f}" for ms in row))
    after = costs.chunk_kv_ms(512, 8192)
    print(
        f"\n512 prompt tokens after 8192 others: {after:.2f} ms more; itl_target_ms: {default_itl_target_ms(costs):.1f}"
    )


def _cells(values: Iterable[object]) -> str:
    return " | ".join(map(str, values)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, ["chain"], [64])
    parser.add_argument("--tensor-parallel", type=int, default=1)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # as a rank on a CPU has it
    results: dict[str, dict[str, dict[str, object]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(arguments)
        write_checkpoints(Path(folder), model)
        for shape in arguments.shapes:
            for batch in arguments.batches:
                spec = engine_spec(Path(folder), shape, batch, Setting(), arguments.tensor_parallel, True)
                if arguments.tiny:
                    scheduler = dataclasses.replace(spec.worker.scheduler, max_step_tokens="auto")
                    spec = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, scheduler=scheduler))
                costs, shapes, phases = measure(with_long_contexts(spec))
                results.setdefault(shape, {})[str(batch)] = {
                    "phases_s": phases,
                    "shapes": [of.name for of in shapes.shapes],
                    "table": msgspec.to_builtins(costs),
                }
                show(shape, batch, costs, shapes)
                print(f"costs measured in {phases.get('costs measured', 0.0):.2f} s", flush=True)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    print(
        json.dumps(
            {
                "bench": "costs",
                "hardware": hardware(),
                "commit": commit(),
                "model": model,
                "tensor_parallel": arguments.tensor_parallel,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
