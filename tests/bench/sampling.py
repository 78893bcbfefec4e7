"""Milliseconds per round by kind of sampling, and microseconds per sampling kernel.

    python -m tests.bench.sampling [--model llama-3.1-8b] [--shapes plain chain] [--batches 1 8 64] [--skip-kernels]

Engines, prompts and method are those of `tests.bench.round`; one engine per shape and batch runs all kinds in turn. The
dummy weights' logits are nearly flat, so top-p keeps most of the vocabulary and its search takes all passes; the
kernels are also timed on peaked logits, as a trained model has them. Markdown tables, then one JSON line. Needs a GPU
for figures that mean anything; `--tiny` tries it on a CPU, without kernels.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from speculative.build import EngineSpec
from speculative.local import local_engine
from tests.bench.gpu_time import captured, elapsed_us
from tests.bench.round import (
    MODELS,
    Setting,
    add_engine_options,
    commit,
    engine_spec,
    hardware,
    model_of,
    timed,
    write_checkpoints,
)
from tests.support.slots import enter
from workers.sampling.sampler import Rows, Sampler, SamplingNeeds, logprobs_of
from workers.scheduling.plan import SamplingParams, SlotInit
from workers.slots.slot_table import SlotTable

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
    results = {}
    with local_engine(spec) as engine:
        timed(engine, batch, setting, KINDS["greedy"])
        for name, kind in KINDS.items():
            short, whole = replace(kind, max_tokens=1), replace(kind, max_tokens=setting.output_tokens)
            first, again = (timed(engine, batch, setting, replace(kind, max_tokens=16)) for _ in range(2))
            prefill = min(timed(engine, batch, setting, short) for _ in range(2))
            best = min(timed(engine, batch, setting, whole) for _ in range(2))
            ms = (best.seconds - prefill.seconds) / (best.steps - prefill.steps) * 1e3
            results[name] = {"ms_per_round": ms, "first_use_s": first.seconds - again.seconds}
            print(shape, batch, name, f"{ms:.3f} ms", flush=True)
    return results


def replay_us(step: Callable[[], object]) -> float:
    """Microseconds of a replay of `step` as a CUDA graph: the median of 21 times of ten replays."""
    step()
    graph = captured(step)

    def replays() -> None:
        for _ in range(10):
            graph.replay()

    return statistics.median(elapsed_us(replays) / 10 for _ in range(21))


@torch.inference_mode()
def kernels(rows: int, size: int) -> dict[str, float]:
    """Microseconds per part of sampling for `rows` bfloat16 rows of a vocabulary of `size`."""
    from workers.distributed.tp_group import SOLO
    from workers.layers.vocab import VocabShard

    device = torch.device("cuda")
    table = SlotTable(len(KINDS), 4, size, device)
    for i, kind in enumerate(KINDS.values()):
        enter(table, SlotInit(i, 0, 5, 14, kind))
    sampler, names = Sampler(table, VocabShard(size, SOLO)), list(KINDS)
    flat = torch.randn((rows, size), device=device)
    logits = {"flat": flat.bfloat16(), "peaked": (flat * 3).bfloat16()}
    positions = torch.arange(rows, device=device).unsqueeze(1)
    out = {}
    for name, needs in (
        ("greedy", SamplingNeeds(False)),
        ("temperature", SamplingNeeds(True)),
        ("top-p 0.9", SamplingNeeds(True, True)),
        ("top-k 50", SamplingNeeds(True, True)),
        ("penalties + logprobs", SamplingNeeds(False, shaping=True)),
    ):
        where = Rows(torch.full((rows,), names.index(name), device=device), positions)
        for kind, x in logits.items():
            out[f"{name}, {kind}"] = replay_us(lambda x=x, where=where, needs=needs: sampler.sample(x, where, needs))
    tokens, x = torch.zeros((rows, 1), dtype=torch.int64, device=device), logits["flat"]
    out["20 log-probabilities"] = replay_us(lambda: logprobs_of(x.unsqueeze(1), tokens, 20))
    drafted, ids = x[:, :32000].contiguous(), torch.arange(32000, device=device)
    for kind in ("temperature", "top-p 0.9", "top-k 50"):
        where, filtered = Rows(torch.full((rows,), names.index(kind), device=device), positions), kind != "temperature"
        out[f"{kind}, noise for a draft of 32,000"] = replay_us(
            lambda where=where, filtered=filtered: sampler.perturb(drafted, where, ids, filtered, SOLO)
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, ["plain", "chain"], [1, 8, 64])
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--no-graphs", action="store_true", help="run rounds eagerly, to see what graphs bring")
    parser.add_argument("--skip-kernels", action="store_true")
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
        timed_kernels: dict[str, dict[str, float]] = {}
        if torch.cuda.is_available() and not arguments.skip_kernels:
            size = MODELS[arguments.model].vocab
            timed_kernels = {str(rows): kernels(rows, size) for rows in (1, 8, 64, 256)}
    for shape, by_batch in results.items():
        print(f"\n| {shape}, ms per round at batch | " + " | ".join(by_batch) + " |")
        print("| --- |" + " --- |" * len(by_batch))
        for kind in KINDS:
            print(f"| {kind} | " + " | ".join(f"{row[kind]['ms_per_round']:.2f}" for row in by_batch.values()) + " |")
    if timed_kernels:
        print("\n| us at rows | " + " | ".join(timed_kernels) + " |")
        print("| --- |" + " --- |" * len(timed_kernels))
        for kind in next(iter(timed_kernels.values())):
            print(f"| {kind} | " + " | ".join(f"{row[kind]:.1f}" for row in timed_kernels.values()) + " |")
    print(
        json.dumps(
            {
                "bench": "sampling",
                "hardware": hardware(),
                "commit": commit(),
                "model": arguments.model,
                "tensor_parallel": arguments.tensor_parallel,
                "results": results,
                "kernels_us": timed_kernels,
            }
        )
    )


if __name__ == "__main__":
    main()
