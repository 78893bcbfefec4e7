"""Milliseconds per round by kind of sampling.

    python -m tests.bench sampling [--model llama-3.1-8b] [--shapes plain chain] [--batches 1 8 64]

Engines, prompts and method are those of `tests.bench.round`; one engine per shape and batch runs all kinds in turn. The
dummy weights' logits are nearly flat, so that top-p keeps most of the vocabulary and its search takes all passes.
Markdown tables, then one JSON line. Needs a GPU for figures that mean anything; `--tiny` tries it on a CPU.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from msgspec.structs import replace

from aerie.speculative.build import EngineSpec, local_engine
from aerie.workers.scheduling.plan import SamplingParams
from tests.bench.prompts import random_prompts
from tests.bench.round import (
    Setting,
    add_engine_options,
    commit,
    engine_spec,
    hardware,
    model_of,
    timed,
    write_checkpoints,
)

KINDS = {
    "greedy": SamplingParams(1, 0.0),
    "temperature": SamplingParams(1, 0.8, seed=1),
    "top-p 0.9": SamplingParams(1, 0.8, top_p=0.9, seed=1),
    "top-k 50": SamplingParams(1, 0.8, top_k=50, seed=1),
    "penalties + logprobs": SamplingParams(1, 0.0, presence_penalty=0.5, frequency_penalty=0.2, logprobs=5),
    "greedy again": SamplingParams(1, 0.0),  # after tokens were counted: must cost what greedy did
}


def measure(spec: EngineSpec, shape: str, batch: int, setting: Setting) -> dict[str, dict[str, float]]:
    """Per kind: ms per round, and the seconds that its first batch took longer than the next, captures included."""
    prompts, results = random_prompts(spec.worker.model, batch, setting.prompt_tokens), {}
    with local_engine(spec) as engine:
        timed(engine, prompts, KINDS["greedy"])
        for name, kind in KINDS.items():
            short, whole = replace(kind, max_tokens=1), replace(kind, max_tokens=setting.output_tokens)
            first, again = (timed(engine, prompts, replace(kind, max_tokens=16)) for _ in range(2))
            prefill = min(timed(engine, prompts, short) for _ in range(2))
            best = min(timed(engine, prompts, whole) for _ in range(2))
            ms = (best.seconds - prefill.seconds) / (best.steps - prefill.steps) * 1e3
            results[name] = {"ms_per_round": ms, "first_use_s": first.seconds - again.seconds}
            print(shape, batch, name, f"{ms:.3f} ms", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, ["plain", "chain"], [1, 8, 64])
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--no-graphs", action="store_true", help="run rounds eagerly, to see what graphs bring")
    arguments = parser.parse_args()
    setting = Setting(40, 24) if arguments.tiny else Setting()
    results: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoints(Path(folder), model_of(arguments))
        for shape in arguments.shapes:
            for batch in arguments.batches:
                spec = engine_spec(
                    Path(folder), shape, batch, setting, arguments.tensor_parallel, not arguments.no_graphs
                )
                results.setdefault(shape, {})[str(batch)] = measure(spec, shape, batch, setting)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    for shape, by_batch in results.items():
        print(f"\n| {shape}, ms per round at batch | " + " | ".join(by_batch) + " |")
        print("| --- |" + " --- |" * len(by_batch))
        for kind in KINDS:
            print(f"| {kind} | " + " | ".join(f"{row[kind]['ms_per_round']:.2f}" for row in by_batch.values()) + " |")
    print(
        json.dumps(
            {
                "bench": "sampling",
                "hardware": hardware(),
                "commit": commit(),
                "model": arguments.model,
                "tensor_parallel": arguments.tensor_parallel,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
