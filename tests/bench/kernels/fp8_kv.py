"""Attention over FP8 pages against pages of bfloat16, by the triton backend (GPU).

    python -m tests.bench fp8_kv [--widths 1 4 8] [--shapes 64x8192 8x8192 1x32768 32x2048] [--latent]

Microseconds per layer at Llama-3.1-8B's shape (`tests.bench.kernels.attention`), or with --latent at DeepSeek-V3's on
one of eight ranks (`tests.bench.kernels.latent_attention`). A CUDA graph holds a pass of several layers with KV of
their own, so that the L2 cache is cold for each. Both dtypes take turns. floor: the FP8 pages' bytes over the rate of a
copy, measured in the same turns. Prompt chunks follow. A Markdown table, then one JSON line.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from aerie.attention.registry import build_backend
from aerie.deploy.bench.figures import table
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.kv.batches import DecodeBatch, LatentKV, LayerKV, Mode, PrefillBatch, causal_mask
from aerie.kernels.kv.stored_values import FP8
from tests.bench.kernels.attention import DIM, HEADS, KV_HEADS, MAX_PREFIX
from tests.bench.kernels.gpu_time import Clock, captured, hardware, random_memory
from tests.bench.kernels.latent_attention import LATENT, WIDTH
from tests.bench.machine import commit
from tests.support.kernels.attention_cases import random_table

BYTES_A_PASS = 400 << 20  # of FP8 pages: eight times the L2 cache
MAX_LAYERS = 32
LATENT_HEADS = 16
CHUNKS = ((8, 4096, 0), (4, 512, 8192), (1, 512, 32256))  # chunks, rows, start

Layer = LayerKV | LatentKV


@dataclass(frozen=True)
class Case:
    """One row of the table; microseconds of a layer. floor_us: of FP8 pages; None for prompt chunks."""

    work: str
    context: int
    batch: int
    bf16_us: float
    fp8_us: float
    floor_us: float | None

    @property
    def ratio(self) -> float:
        return round(self.fp8_us / self.bf16_us, 3)


@dataclass(frozen=True)
class Shape:
    """How KV is kept. page_size: that `cache.page_size` has by default, or is best for latent rows."""

    latent: bool

    @property
    def page_size(self) -> int:
        return 64 if self.latent else 16

    @property
    def numbers(self) -> int:
        """How many numbers the KV of a token has in one layer."""
        return WIDTH if self.latent else 2 * KV_HEADS * DIM

    @property
    def scale(self) -> float:
        return 192**-0.5 if self.latent else DIM**-0.5

    def queries(self, rows: int) -> Tensor:
        heads, dim = (LATENT_HEADS, WIDTH) if self.latent else (HEADS, DIM)
        return torch.randn((rows, heads, dim), dtype=torch.bfloat16, device="cuda")

    def layers(self, memory: Tensor, num_pages: int, most: int) -> list[Layer]:
        """Layers with pages 0 to num_pages each, as many as move BYTES_A_PASS in FP8, in `memory` of either dtype."""
        each = (num_pages + 1) * self.page_size * self.numbers
        count = max(1, min(most, MAX_LAYERS, memory.numel() // each, 1 + BYTES_A_PASS // each))
        pages = (num_pages + 1, self.page_size)
        if self.latent:
            return [LatentKV(part.view(*pages, WIDTH), LATENT) for part in memory[: count * each].split(each)]
        parts = [part.view(2, *pages, KV_HEADS, DIM) for part in memory[: count * each].split(each)]
        return [LayerKV(part[0], part[1]) for part in parts]


def decode_pass(batch: DecodeBatch, q: Tensor, layers: list[Layer], scale: float) -> Callable[[], None]:
    """All layers of one pass, planning included."""
    backend = build_backend("triton", batch.mode)

    def run() -> None:
        prepared = backend.prepare(batch)
        for layer in layers:
            prepared.plan(q, layer, ScoreRule(scale))
            prepared.forward(q, layer, ScoreRule(scale))

    return run


def rounds(clock: Clock, memories: tuple[Tensor, Tensor], shape: Shape, rows: int, batch: int, context: int) -> Case:
    """memories: bfloat16, FP8."""
    lengths = [context + rows] * batch
    num_pages = sum(-(-n // shape.page_size) for n in lengths)
    device = memories[0].device
    decode = DecodeBatch(
        Mode.DECODE if rows == 1 else Mode.VERIFY,
        rows,
        rows,
        torch.full((batch,), context, dtype=torch.int32, device=device),
        causal_mask(batch, rows, device).contiguous(),
        random_table(lengths, shape.page_size, MAX_PREFIX // shape.page_size).to(device),
        MAX_PREFIX,
    )
    q = shape.queries(decode.num_rows)
    most = len(shape.layers(memories[0], num_pages, MAX_LAYERS))
    layers = [shape.layers(memory, num_pages, most) for memory in memories]
    times, rate = clock.medians(*(captured(decode_pass(decode, q, each, shape.scale)).replay for each in layers))
    bf16, fp8 = (round(us / len(each), 2) for us, each in zip(times, layers, strict=True))
    return Case(f"rounds of {rows}", context, batch, bf16, fp8, round(sum(lengths) * shape.numbers / rate * 1e6, 2))


def prompts(clock: Clock, memories: tuple[Tensor, Tensor], shape: Shape) -> list[Case]:
    """Prompt chunks; of latent rows in the absorbed form."""
    cases = []
    for count, rows, start in CHUNKS:
        lengths = [start + rows] * count
        width = -(-(start + rows) // shape.page_size)
        page_table = random_table(lengths, shape.page_size, width).to(memories[0].device)
        batch = PrefillBatch.from_lists([start] * count, [rows] * count, page_table)
        q = shape.queries(count * rows)
        prepared = build_backend("triton", Mode.PREFILL).prepare(batch)
        runs = []
        for memory in memories:
            (layer,) = shape.layers(memory, count * width, 1)
            runs.append(lambda layer=layer, q=q, prepared=prepared: prepared.forward(q, layer, ScoreRule(shape.scale)))
        times, _ = clock.medians(*(captured(run).replay for run in runs))
        bf16, fp8 = (round(us, 1) for us in times)
        cases.append(Case(f"prompts of {rows}", start + rows, count, bf16, fp8, None))
    return cases


def fp8_memory(gigabytes: int) -> Tensor:
    """Random FP8 numbers on the GPU."""
    memory = torch.empty(gigabytes << 30, dtype=FP8, device="cuda")
    for part in memory.split(1 << 30):
        part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16))
    return memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="*", default=[1, 4, 8], help="rows per request")
    parser.add_argument("--shapes", nargs="*", default=["64x8192", "8x8192", "1x32768", "32x2048"], metavar="BxCONTEXT")
    parser.add_argument("--latent", action="store_true", help="latent rows instead of K/V heads")
    parser.add_argument("--gigabytes", type=int, default=16, help="memory for KV in bfloat16; FP8 takes half")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    shape, clock = Shape(args.latent), Clock(args.rounds)
    memories = random_memory(args.gigabytes), fp8_memory(args.gigabytes // 2)
    cases = [
        rounds(clock, memories, shape, width, *map(int, given.split("x")))
        for given in args.shapes
        for width in args.widths
    ]
    cases += prompts(clock, memories, shape)
    rows = [(c.work, c.context, c.batch, c.bf16_us, c.fp8_us, c.ratio, c.floor_us or "") for c in cases]
    print(*table(["work", "KV", "batch", "bf16, us", "FP8, us", "ratio", "floor, us"], rows), sep="\n")
    found = [asdict(case) | {"ratio": case.ratio} for case in cases]
    kind = "latent rows" if args.latent else "heads"
    print(json.dumps({"bench": "fp8_kv", "kv": kind, "hardware": hardware(), "commit": commit(), "cases": found}))


if __name__ == "__main__":
    main()
