"""Attention over latent rows (MLA) on a GPU: every installed backend.

    python -m tests.bench latent_attention [--widths 1 4 8] [--batches 1 8 32 64] [--contexts 512 4096 32768]

Microseconds per layer at the shape of DeepSeek-V3 on one of eight ranks (16 heads, rows of 512 + 64 bfloat16 numbers,
pages in random order), with the share of a copy's bandwidth that reading the latent rows comes to (the copy is measured
in the same turns) and TFLOP/s of both products. A CUDA graph holds a pass of many layers with rows of their own, so
that the L2 cache is cold for each, and the plan that they share. One JSON line last.
"""

import argparse
import dataclasses
import json
from importlib.util import find_spec

import torch
from torch import Tensor

from aerie.attention.registry import build_backend
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import DecodeBatch, LatentKV, Mode, causal_mask
from tests.bench.kernels.attention import MAX_PREFIX
from tests.bench.kernels.gpu_time import Clock, captured, hardware, random_memory
from tests.bench.machine import commit
from tests.support.kernels.attention_cases import random_table

LATENT, ROTATED = 512, 64
WIDTH = LATENT + ROTATED
SCALE = 192**-0.5
BYTES_A_PASS = 400 << 20  # eight times the L2 cache
MAX_LAYERS = 32


@dataclasses.dataclass(frozen=True)
class Case:
    """A pass: `rows` rows for each of `batch` requests of `context` tokens."""

    context: int
    batch: int
    rows: int
    heads: int
    page_size: int

    @property
    def num_bytes(self) -> int:
        return self.batch * (self.context + self.rows) * WIDTH * 2

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.heads * (self.context + self.rows) * (WIDTH + LATENT)


class Pass:
    """One case in memory: run() attends to layer after layer."""

    def __init__(self, case: Case, memory: Tensor, backend: str = "triton", chain: bool = True) -> None:
        device, page = memory.device, case.page_size
        pages = case.batch * -(-(case.context + case.rows) // page)
        each = (pages + 1) * page * WIDTH
        self.num_layers = max(1, min(MAX_LAYERS, memory.numel() // each, 2 + BYTES_A_PASS // case.num_bytes))
        views = memory[: self.num_layers * each].view(self.num_layers, pages + 1, page, WIDTH)
        self.layers = [LatentKV(view, LATENT) for view in views]
        self.table = random_table([case.context + case.rows] * case.batch, page, MAX_PREFIX // page).to(device)
        prefix = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
        mask = causal_mask(case.batch, case.rows, device)
        self.decode = DecodeBatch(Mode.VERIFY, case.rows, case.rows, prefix, mask, self.table, MAX_PREFIX, chain=chain)
        self.q = torch.randn((case.batch * case.rows, case.heads, WIDTH), device=device, dtype=memory.dtype)
        self.case, self.backend = case, build_backend(backend, Mode.VERIFY)

    def run(self) -> None:
        prepared = self.backend.prepare(self.decode)
        for layer in self.layers:
            prepared.forward(self.q, layer, ScoreRule(SCALE))


def measure(clock: Clock, memory: Tensor, cases: list[Case]) -> list[dict[str, float]]:
    """Every backend that is installed, of rows that are a chain, and of a tree's where that is another kernel."""
    results = []
    for case in cases:
        ways = {"triton": Pass(case, memory)}
        if find_spec("flashinfer") is not None:
            ways["flashinfer"] = Pass(case, memory, "flashinfer")
            if case.rows > 1:
                ways["flashinfer_tree"] = Pass(case, memory, "flashinfer", chain=False)
        times, rate = clock.medians(*(captured(way.run).replay for way in ways.values()))
        found = dataclasses.asdict(case) | {"copy_tbs": round(rate / 1e12, 3)}
        for (name, way), time in zip(ways.items(), times, strict=True):
            us = time / way.num_layers
            found[f"{name}_us"] = round(us, 2)
            found[f"{name}_share"] = round(case.num_bytes / us * 1e6 / rate, 3)
            found[f"{name}_tflops"] = round(case.flops / us / 1e6, 1)
        results.append(found)
        print(", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--widths", type=int, nargs="*", default=[1, 4, 8], help="rows per request")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="*", default=[512, 4096, 32768])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--gigabytes", type=int, default=16, help="memory for latent rows")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    memory, clock = random_memory(args.gigabytes), Clock(args.rounds)
    cases = [
        Case(context, batch, rows, args.heads, args.page_size)
        for context in args.contexts
        for batch in args.batches
        for rows in args.widths
    ]
    results = measure(clock, memory, cases)
    print(json.dumps({"bench": "latent_attention", "hardware": hardware(), "commit": commit(), "results": results}))


if __name__ == "__main__":
    main()
