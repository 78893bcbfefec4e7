"""Attention over K/V heads on a GPU: every installed backend in every mode.

    python -m tests.bench attention [--batches 1 8 32 64] [--widths 1 4 8 16] [--contexts 1024 8192 32768]

Microseconds per layer at Llama-3.1-8B's shape (32 query heads, 8 KV heads, dimension 128, bfloat16, pages of 16 in
random order), or at that of `--heads`, `--kv-heads` and `--dim`, without prompt chunks. `--window`: of a layer with a
window; Gemma-3-27B's are `--kv-heads 16 --window 1024`. A CUDA graph holds a pass of several layers with KV of their
own, so that the L2 cache is cold for each; planning is in it once. A figure is the median of replays that take turns.
floor: the KV bytes that rows see, over the rate of a copy, measured in the same turns; a prompt chunk has TFLOP/s
instead. Markdown tables, then one JSON line.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from unittest import mock

import torch
from torch import Tensor

from aerie.attention.backends import flashinfer_backend
from aerie.attention.limits import AttentionUse
from aerie.attention.registry import BACKENDS, build_backend, refusal
from aerie.deploy.bench.figures import table
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import Capability
from aerie.kernels.kv.batches import DecodeBatch, LayerKV, Mode, PrefillBatch
from tests.bench.kernels.gpu_time import Clock, captured, hardware, random_memory
from tests.bench.machine import commit
from tests.support.kernels.attention_cases import Work, mask_of, random_table

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
MAX_PREFIX = 131072  # of the page table, as a server that allows long requests has it
NAMES = tuple(name for name in BACKENDS if name != "torch")
BYTES_A_PASS = 400 << 20  # eight times the L2 cache
MAX_LAYERS = 32
TREE_TOP_K, TREE_TAIL, CHAIN_TAIL = 4, 8, 3
CHUNKS = ((64, 512, 0), (8, 4096, 0), (1, 16384, 0), (4, 512, 8192), (1, 512, 32256))  # chunks, rows, start


@dataclass(frozen=True)
class Layer:
    """Heads of an attention layer. window: keys that a row sees at most; None: all."""

    heads: int = HEADS
    kv_heads: int = KV_HEADS
    dim: int = DIM
    window: int | None = None

    @property
    def rule(self) -> ScoreRule:
        return ScoreRule(self.dim**-0.5, self.window)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.dim * 2

    def read_bytes(self, batch: int, context: int, suffix: int) -> int:
        """Return the bytes of KV that a pass must read, in which each request's last `suffix` positions have rows."""
        seen = context + suffix
        return (
            batch
            * (seen if self.window is None else min(seen, self.window + max(suffix, 1) - 1))
            * self.bytes_per_token
        )


@dataclass(frozen=True)
class Case:
    """One row of the table. us: by backend. floor: microseconds of copying the KV, or TFLOP/s of the fastest."""

    work: str
    context: int
    batch: int
    rows: int
    us: dict[str, float]
    floor: float


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


def is_served(name: str, mode: Mode, tree: bool, dtype: torch.dtype, layer: Layer) -> bool:
    """Whether backend `name` serves this use on this GPU."""
    capability = torch.cuda.get_device_capability()
    use = AttentionUse(
        mode,
        layer.heads,
        layer.kv_heads,
        layer.dim,
        PAGE,
        dtype,
        Capability("cuda", capability),
        tree,
        scores=(layer.rule,),
    )
    return refusal(name, use) is None


def layer_views(memory: Tensor, num_layers: int, num_pages: int, layer: Layer) -> list[LayerKV]:
    """KV of `num_layers` layers, pages 0 to num_pages, in one memory."""
    shape = (num_layers, 2, num_pages + 1, PAGE, layer.kv_heads, layer.dim)
    pools = memory[: math.prod(shape)].view(shape)
    return [LayerKV(pool[0], pool[1]) for pool in pools]


def layers_of(memory: Tensor, context: int, batch: int, layer: Layer) -> list[LayerKV]:
    """As many layers as move BYTES_A_PASS, as far as memory suffices."""
    wanted = min(MAX_LAYERS, max(2, BYTES_A_PASS // layer.read_bytes(batch, context, 0)))
    pages = batch * (-(-context // PAGE) + 2)
    fitting = memory.numel() // (2 * (pages + 1) * PAGE * layer.kv_heads * layer.dim)
    return layer_views(memory, min(wanted, fitting), pages, layer)


def decode_pass(name: str, batch: DecodeBatch, q: Tensor, layers: list[LayerKV], rule: ScoreRule) -> Callable[[], None]:
    """All layers of one pass, planning included."""
    backend = build_backend(name, batch.mode)

    def run() -> None:
        prepared = backend.prepare(batch)
        for kv in layers:
            prepared.forward(q, kv, rule)

    return run


def decode_cases(clock: Clock, memory: Tensor, widths: list[int], context: int, batch: int, layer: Layer) -> list[Case]:
    """A row for each mode and number of rows at one context and batch."""
    layers, device = layers_of(memory, context, batch, layer), memory.device
    listed = works(widths)
    passes, keys = [], []  # graphs hold the addresses of what a pass holds
    for number, work in enumerate(listed):
        decode = DecodeBatch(
            work.mode,
            work.rows,
            work.suffix_len,
            torch.full((batch,), context, dtype=torch.int32, device=device),
            mask_of(work, batch).to(device),
            random_table([context + work.suffix_len] * batch, PAGE, MAX_PREFIX // PAGE).to(device),
            MAX_PREFIX,
        )
        q = torch.randn((decode.num_rows, layer.heads, layer.dim), device=device, dtype=memory.dtype)
        for name in NAMES:
            if is_served(name, work.mode, work.tree, q.dtype, layer):
                passes.append(decode_pass(name, decode, q, layers, layer.rule))
                keys.append((number, name))
    times, rate = clock.medians(*(captured(run).replay for run in passes))
    found: list[dict[str, float]] = [{} for _ in listed]
    for (number, name), us in zip(keys, times, strict=True):
        found[number][name] = round(us / len(layers), 2)
    return [
        Case(
            work.name,
            context,
            batch,
            work.rows,
            us,
            round(layer.read_bytes(batch, context, work.suffix_len) / rate * 1e6, 2),
        )
        for work, us in zip(listed, found, strict=True)
    ]


def prompt_cases(clock: Clock, memory: Tensor) -> list[Case]:
    """Prompt chunks at Llama's shape, by triton and both of FlashInfer's kernels; `floor`: TFLOP/s of the fastest."""
    llama = Layer()
    cases = []
    for count, rows, start in CHUNKS:
        pages = -(-(start + rows) // PAGE)
        page_table = random_table([start + rows] * count, PAGE, pages).to(memory.device)
        batch = PrefillBatch.from_lists([start] * count, [rows] * count, page_table)
        q = torch.randn((count * rows, HEADS, DIM), device=memory.device, dtype=memory.dtype)
        layer = layer_views(memory, 1, count * pages, llama)[0]
        runs = {"triton": _chunks("triton", batch, q, layer)}
        for kernel in ("fa2", "fa3") if find_spec("flashinfer") else ():
            with mock.patch.object(flashinfer_backend, "prefill_kernel", lambda device, k=kernel: k):
                runs[f"flashinfer {kernel}"] = _chunks("flashinfer", batch, q, layer)
        times, _ = clock.medians(*(captured(run).replay for run in runs.values()))
        us = {name: round(t, 1) for name, t in zip(runs, times, strict=True)}
        flops = 4 * count * (start * rows + rows * (rows + 1) // 2) * DIM * HEADS
        cases.append(
            Case(f"prompts at {start}", start + rows, count, rows, us, round(flops / min(us.values()) / 1e6, 1))
        )
    return cases


def _chunks(name: str, batch: PrefillBatch, q: Tensor, layer: LayerKV) -> Callable[[], object]:
    prepared = build_backend(name, Mode.PREFILL).prepare(batch)
    prepared.forward(q, layer, Layer().rule)
    return lambda: prepared.forward(q, layer, Layer().rule)


def markdown(cases: list[Case], last: str) -> list[str]:
    """A row for each case. last: what `floor` is."""
    names = list(dict.fromkeys(name for case in cases for name in case.us))
    rows = [
        (c.work, c.context, c.batch, c.rows, *(c.us.get(name, "refused") for name in names), c.floor) for c in cases
    ]
    return table(["mode", "KV", "batch", "rows", *names, last], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--widths", type=int, nargs="*", default=[1, 4, 8, 16], help="rows per request")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192, 32768])
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--kv-heads", type=int, default=KV_HEADS)
    parser.add_argument("--dim", type=int, default=DIM, help="of a head")
    parser.add_argument("--window", type=int, help="keys that a row sees at most")
    parser.add_argument("--gigabytes", type=int, default=40, help="memory for KV")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    memory, clock = random_memory(args.gigabytes), Clock(args.rounds)
    layer = Layer(args.heads, args.kv_heads, args.dim, args.window)
    prompts = prompt_cases(clock, memory) if layer == Layer() else []
    print(*markdown(prompts, "TFLOP/s"), "", sep="\n", flush=True)
    decoding: list[Case] = []
    for context in args.contexts:
        for batch in args.batches:
            if batch * (context + 2 * PAGE) * layer.bytes_per_token * 2 <= memory.nbytes:
                found = decode_cases(clock, memory, args.widths, context, batch, layer)
                print(*markdown(found, "floor, us"), "", sep="\n", flush=True)
                decoding += found
    print(
        json.dumps(
            {
                "bench": "attention",
                "hardware": hardware(),
                "commit": commit(),
                "layer": asdict(layer),
                "prompts": [asdict(case) for case in prompts],
                "decoding": [asdict(case) for case in decoding],
            }
        )
    )


if __name__ == "__main__":
    main()
