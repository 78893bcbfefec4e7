"""What each attention backend costs in each mode on a GPU: `python -m tests.bench.attention_backends`.

Microseconds per layer call at Llama-3.1-8B's shape (32 query heads, 8 KV heads, dimension 128, bfloat16, pages of 16 in
random order). A CUDA graph holds a pass of several layers with KV of their own, so that the L2 cache is cold for each;
planning is in it once. A figure is the median over replays in turns. Kernels that are not installed are left out. A
Markdown table, then one JSON line.
"""

import argparse
import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from attention.backend import AttentionBackend
from attention.backends import flashinfer_backend
from attention.limits import AttentionUse
from attention.metadata import DecodeBatch, Mode, PrefillBatch
from attention.registry import BACKENDS, build_backend, refusal
from attention.views import LayerKV
from tests.bench.attention import (
    BYTES_PER_TOKEN,
    DIM,
    HEADS,
    KV_HEADS,
    MAX_PREFIX,
    PAGE,
    SCALE,
    Clock,
    layer_views,
    random_memory,
)
from tests.bench.gpu_time import captured
from tests.support.attention_cases import Work, mask_of, random_table

NAMES = tuple(name for name in BACKENDS if name != "torch")
BYTES_A_PASS = 400 << 20  # eight times the L2 cache
MAX_LAYERS = 32
TREE_TOP_K, TREE_TAIL, CHAIN_TAIL = 4, 8, 3
CHUNKS = ((64, 512, 0), (8, 4096, 0), (1, 16384, 0), (4, 512, 8192), (1, 512, 32256))  # chunks, rows, start


@dataclass(frozen=True)
class Case:
    """One row of the table. us: by backend."""

    work: str
    context: int
    batch: int
    rows: int
    us: dict[str, float]


def works(widths: Iterable[int]) -> list[Work]:
    """Every mode but prompt chunks, at each number of rows."""
    several = [w for w in widths if w > 1]
    return [
        Work("decode", Mode.DECODE),
        *(Work("verify", Mode.VERIFY, w, w, tree=True) for w in several),
        *(Work("draft_extend", Mode.DRAFT_EXTEND, w, w) for w in several),
        Work("draft_decode, chain", Mode.DRAFT_DECODE, 1, CHAIN_TAIL),
        Work("draft_decode, tree", Mode.DRAFT_DECODE, TREE_TOP_K, TREE_TAIL, tree=True),
    ]


def use_of(work: Work, dtype: torch.dtype) -> AttentionUse:
    capability = torch.cuda.get_device_capability()
    return AttentionUse(work.mode, HEADS, KV_HEADS, DIM, PAGE, dtype, "cuda", capability, work.tree)


class Bench:
    """Backends, KV memory and clock of one run."""

    def __init__(self, clock: Clock, memory: Tensor) -> None:
        self.clock, self.memory = clock, memory
        self.backends: dict[str, AttentionBackend] = {name: build_backend(name, Mode.DECODE) for name in NAMES}

    def decode(self, work: Work, context: int, batch: int) -> DecodeBatch:
        table, device = random_table([context + work.suffix_len] * batch, PAGE, MAX_PREFIX // PAGE), self.memory.device
        prefix = torch.full((batch,), context, dtype=torch.int32, device=device)
        return DecodeBatch(
            work.mode, work.rows, work.suffix_len, prefix, mask_of(work, batch).to(device), table.to(device), MAX_PREFIX
        )

    def layers(self, context: int, batch: int) -> list[LayerKV]:
        wanted = min(MAX_LAYERS, max(2, BYTES_A_PASS // (batch * context * BYTES_PER_TOKEN)))
        pages = batch * (-(-context // PAGE) + 2)
        fitting = self.memory.numel() // (2 * (pages + 1) * PAGE * KV_HEADS * DIM)
        return layer_views(self.memory, min(wanted, fitting), pages)

    def rounds(self, widths: Iterable[int], contexts: Iterable[int], batches: Iterable[int]) -> list[Case]:
        cases = []
        for context in contexts:
            for batch in batches:
                cases += self._cases(works(widths), context, batch)
                shown = ", ".join(
                    f"{c.work} {c.rows}: {'/'.join(f'{us:.1f}' for us in c.us.values())}"
                    for c in cases[-len(works(widths)) :]
                )
                print(f"context {context} batch {batch}  {shown}", flush=True)
        return cases

    def _cases(self, listed: list[Work], context: int, batch: int) -> list[Case]:
        layers = self.layers(context, batch)
        passes, keys = [], []  # graphs hold the addresses of what a pass holds
        for number, work in enumerate(listed):
            decode = self.decode(work, context, batch)
            q = torch.randn((decode.num_rows, HEADS, DIM), device=self.memory.device, dtype=self.memory.dtype)
            for name in NAMES:
                if refusal(name, use_of(work, q.dtype)) is None:
                    passes.append(self._pass(name, decode, q, layers))
                    keys.append((number, name))
        graphs = [captured(run) for run in passes]
        *times, _ = self.clock.medians(*(graph.replay for graph in graphs))
        found: list[dict[str, float]] = [{} for _ in listed]
        for (number, name), us in zip(keys, times, strict=True):
            found[number][name] = round(us / len(layers), 2)
        return [Case(work.name, context, batch, work.rows, us) for work, us in zip(listed, found, strict=True)]

    def _pass(self, name: str, batch: DecodeBatch, q: Tensor, layers: list[LayerKV]) -> Callable[[], None]:
        backend = self.backends[name]

        def run() -> None:
            prepared = backend.prepare(batch)
            for layer in layers:
                prepared.forward(q, layer, SCALE)

        return run

    def prefill(self) -> list[Case]:
        """Prompt chunks; flashinfer's both kernels."""
        cases = []
        for count, rows, start in CHUNKS:
            pages = -(-(start + rows) // PAGE)
            table = random_table([start + rows] * count, PAGE, pages).to(self.memory.device)
            batch = PrefillBatch.from_lists([start] * count, [rows] * count, table)
            q = torch.randn((count * rows, HEADS, DIM), device=self.memory.device, dtype=self.memory.dtype)
            layer = layer_views(self.memory, 1, count * pages)[0]
            runs = {"triton": self._chunks("triton", batch, q, layer)}
            for kernel in ("fa2", "fa3"):
                with mock.patch.object(flashinfer_backend, "prefill_kernel", lambda device, k=kernel: k):
                    runs[f"flashinfer {kernel}"] = self._chunks("flashinfer", batch, q, layer)
            graphs = [captured(run) for run in runs.values()]
            *times, _ = self.clock.medians(*(graph.replay for graph in graphs))
            us = {name: round(t, 1) for name, t in zip(runs, times, strict=True)}
            cases.append(Case(f"prefill at {start}", start + rows, count, rows, us))
            print(cases[-1], flush=True)
        return cases

    @staticmethod
    def _chunks(name: str, batch: PrefillBatch, q: Tensor, layer: LayerKV) -> Callable[[], object]:
        prepared = build_backend(name, Mode.PREFILL).prepare(batch)
        prepared.forward(q, layer, SCALE)
        return lambda: prepared.forward(q, layer, SCALE)


def markdown(cases: list[Case]) -> str:
    names = list(dict.fromkeys(name for case in cases for name in case.us))
    lines = [f"| mode | KV | batch | rows | {' | '.join(names)} |", f"| --- | --- | --- | --- |{' --- |' * len(names)}"]
    for case in cases:
        best = min(case.us.values())
        cells = [
            f"**{us:g}**" if us == best and len(case.us) > 1 else f"{us:g}" if us is not None else "refused"
            for us in (case.us.get(name) for name in names)
        ]
        lines.append(f"| {case.work} | {case.context} | {case.batch} | {case.rows} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--widths", type=int, nargs="*", default=[1, 4, 8, 16], help="rows per request")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192, 32768])
    parser.add_argument("--gigabytes", type=int, default=40, help="memory for KV")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    memory = random_memory(args.gigabytes)
    bench = Bench(Clock(args.rounds), memory)
    tables = {
        "prefill": bench.prefill(),
        "rounds": bench.rounds(args.widths, args.contexts, args.batches),
    }
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "python", platform.python_version())
    for name, cases in tables.items():
        print(f"\n{name}, microseconds\n\n{markdown(cases)}", flush=True)
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                **{name: [vars(case) for case in cases] for name, cases in tables.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
