"""What attention costs on a GPU: `python -m tests.bench.attention`.

Microseconds per layer call of the triton backend at Llama-3.1-8B's shape (32 query heads, 8 KV heads, dimension 128,
bfloat16, pages of 16 in random order). A CUDA graph holds one pass of many layers with KV of their own, so that the L2
cache is cold for each; a figure is the median over replays, with copies of two large buffers measured in between for
the bandwidth that KV bytes are compared with. Prefill is compared with PyTorch's flash attention. JSON line last.
"""

import argparse
import json
import math
import platform
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.kv_cache.heads import store_reference
from attention.metadata import DecodeBatch, Mode, PrefillBatch, causal_mask
from attention.registry import build_backend
from attention.views import LayerKV
from tests.bench.gpu_time import captured, elapsed_us
from tests.support.attention_cases import random_table

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
BYTES_PER_TOKEN = 2 * KV_HEADS * DIM * 2
COPY_BYTES = 2 << 30
NUM_LAYERS = 32  # where memory suffices; the smallest case moves 80 MB a pass, more than the L2 cache holds
MAX_PREFIX = 131072  # of the page table, as a server that allows long requests would have it
SCALE = DIM**-0.5


class Clock:
    """Medians of replays in turns: a round times everything once, so that drift of the device hits all alike."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.source = torch.randn(COPY_BYTES // 4, device="cuda")
        self.target = torch.empty_like(self.source)

    def copy_rate(self, microseconds: float) -> float:
        """TB/s of a copy, bytes read and written."""
        return 2 * COPY_BYTES / microseconds / 1e6

    def medians(self, *runs: Callable[[], object]) -> list[float]:
        """Microseconds of each run, and of a copy, last."""
        timed: list[list[float]] = [[] for _ in range(len(runs) + 1)]
        for run in runs:
            run()
        for _ in range(self.rounds):
            for run, times in zip((*runs, lambda: self.target.copy_(self.source)), timed, strict=True):
                times.append(elapsed_us(run))
        return [statistics.median(times) for times in timed]


def layer_views(memory: Tensor, num_layers: int, num_pages: int) -> list[LayerKV]:
    """KV of num_layers layers, pages 0 .. num_pages, in one memory."""
    shape = (num_layers, 2, num_pages + 1, PAGE, KV_HEADS, DIM)
    pools = memory[: math.prod(shape)].view(shape)
    return [LayerKV(pool[0], pool[1]) for pool in pools]


def decode_layers(
    memory: Tensor, batch: int, rows: int, context: int, window: int | None
) -> tuple[Callable[[], None], int]:
    """A pass of verify attention, and its number of layers."""
    pages = -(-(context + rows) // PAGE)
    bytes_per_layer = 2 * (batch * pages + 1) * PAGE * KV_HEADS * DIM * 2
    num_layers = min(NUM_LAYERS, memory.nbytes // bytes_per_layer)
    layers = layer_views(memory, num_layers, batch * pages)
    table, device = random_table([context + rows] * batch, PAGE, max(MAX_PREFIX // PAGE, pages)), memory.device
    decode = DecodeBatch(
        Mode.VERIFY,
        rows,
        rows,
        torch.full((batch,), context, dtype=torch.int32, device=device),
        causal_mask(batch, rows, device),
        table.to(device),
        MAX_PREFIX,
        window=window,
    )
    q = torch.randn((batch * rows, HEADS, DIM), device=device, dtype=memory.dtype)
    backend = build_backend("triton", Mode.VERIFY)

    def run() -> None:
        prepared = backend.prepare(decode)
        for layer in layers:
            prepared.forward(q, layer, SCALE)

    return run, num_layers


def bench_decode(
    clock: Clock, memory: Tensor, batches: list[int], widths: list[int], contexts: list[int], window: int | None
) -> list[dict]:
    results = []
    for context in contexts:
        for batch in batches:
            if batch * (context + PAGE * 2) * BYTES_PER_TOKEN * 2 > memory.nbytes:
                continue
            passes = [decode_layers(memory, batch, rows, context, window) for rows in widths]
            graphs = [captured(run) for run, _ in passes]
            *times, copy = clock.medians(*(graph.replay for graph in graphs))
            rate = clock.copy_rate(copy)
            for rows, (_, num_layers), time in zip(widths, passes, times, strict=True):
                seen = context + rows if window is None else min(context + rows, window)
                floor = batch * seen * BYTES_PER_TOKEN / rate / 1e6
                us = time / num_layers
                results.append(
                    {
                        "context": context,
                        "batch": batch,
                        "rows": rows,
                        "us": round(us, 2),
                        "floor_us": round(floor, 2),
                        "share": round(floor / us, 3),
                        "copy_tbs": round(rate, 3),
                    }
                )
            cells = [f"W={r['rows']}: {r['us']:.1f} us {100 * r['share']:.0f} %" for r in results[-len(widths) :]]
            print(f"context {context:6} batch {batch:4}  copy {rate:.2f} TB/s  {'  '.join(cells)}", flush=True)
    return results


def bench_prefill(clock: Clock, memory: Tensor, shapes: list[tuple[int, int]]) -> list[dict]:
    """Chunks of equal length from position 0, against PyTorch's flash attention on dense tensors."""
    results = []
    for chunks, length in shapes:
        pages = -(-length // PAGE)
        table = random_table([length] * chunks, PAGE, pages).to(memory.device)
        batch = PrefillBatch.from_lists([0] * chunks, [length] * chunks, table)
        q = torch.randn((chunks * length, HEADS, DIM), device=memory.device, dtype=memory.dtype)
        kv = layer_views(memory, 1, chunks * pages)[0]
        prepared = build_backend("triton", Mode.PREFILL).prepare(batch)
        prepared.forward(q, kv, SCALE)
        dense = [
            torch.randn((chunks, heads, length, DIM), device=memory.device, dtype=memory.dtype)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]

        def flash(dense: list[Tensor] = dense) -> None:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                F.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)

        ours = captured(lambda: prepared.forward(q, kv, SCALE))  # noqa: B023
        ours_us, flash_us, _ = clock.medians(ours.replay, captured(flash).replay)
        flops = 4 * chunks * (length * (length + 1) // 2) * DIM * HEADS
        results.append(
            {
                "chunks": chunks,
                "length": length,
                "us": round(ours_us, 1),
                "flash_us": round(flash_us, 1),
                "tflops": round(flops / ours_us / 1e6, 1),
            }
        )
        print(
            f"prefill {chunks} x {length}: {ours_us:.1f} us, {flops / ours_us / 1e6:.0f} TFLOP/s; "
            f"PyTorch's flash attention {flash_us:.1f} us",
            flush=True,
        )
    return results


def bench_rope_store(clock: Clock, memory: Tensor, sizes: list[int]) -> list[dict]:
    """One launch of rope_store against the same in torch."""
    from attention.ops import rope_store_triton

    results = []
    for rows in sizes:
        layers = layer_views(memory, 32, rows // PAGE + 1)
        packed = torch.randn((32, rows, HEADS + 2 * KV_HEADS, DIM), device=memory.device, dtype=memory.dtype)
        parts = [p.split([HEADS, KV_HEADS, KV_HEADS], 1) for p in packed]
        cos, sin = torch.randn((2, rows, DIM // 2), device=memory.device)
        row = torch.arange(rows, device=memory.device)

        def run(function: Callable[..., None], **options: bool) -> None:
            for part, layer in zip(parts, layers, strict=True):  # noqa: B023
                function(*part, cos, sin, row, layer, row + PAGE, **options)  # noqa: B023

        graphs = [captured(lambda: run(rope_store_triton.rope_store)), captured(lambda: run(store_reference))]
        fused, torch_us, _ = clock.medians(*(graph.replay for graph in graphs))
        results.append({"rows": rows, "us": round(fused / 32, 2), "torch_us": round(torch_us / 32, 2)})
        print(f"rope_store {rows} rows: {fused / 32:.2f} us; in torch {torch_us / 32:.2f} us", flush=True)
    return results


def random_memory(gigabytes: int) -> Tensor:
    """bfloat16 numbers on the GPU, for the KV of all layers."""
    torch.manual_seed(0)
    memory = torch.empty(gigabytes << 29, dtype=torch.bfloat16, device="cuda")
    for part in memory.split(1 << 30):
        part.normal_()
    return memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument("--widths", type=int, nargs="*", default=[1, 4, 8, 16], help="rows per request")
    parser.add_argument("--contexts", type=int, nargs="*", default=[640, 1024, 8192, 32768])
    parser.add_argument("--gigabytes", type=int, default=80, help="memory for KV")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--window", type=int, help="tokens that rows see, as those of a draft may; then rounds alone")
    args = parser.parse_args()
    memory = random_memory(args.gigabytes)
    clock = Clock(args.rounds)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "python", platform.python_version(), flush=True)
    decode = bench_decode(clock, memory, args.batches, args.widths, args.contexts, args.window)
    figures = {"device": torch.cuda.get_device_name(), "window": args.window, "decode": decode}
    if args.window is None:
        figures["prefill"] = bench_prefill(clock, memory, [(64, 512), (8, 4096), (1, 16384)])
        figures["rope_store"] = bench_rope_store(clock, memory, [4, 256, 8192])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
