"""The gated delta rule of one layer on a GPU: rounds by batch and rows, and prompt chunks.

    python -m tests.bench delta_rule [--models 27B 35B-A3B] [--batches 1 8 32 64] [--widths 1 4 8 16] [--path 4]
                                     [--tokens 512 2048 8192]
    python -m tests.bench delta_rule --widths 32 --path 8 --tokens

Microseconds per layer of Qwen3.5's sizes, in bfloat16 with float32 states. A CUDA graph holds several layers, so that
no cache has their states. Rounds replay one committed row fewer than there is room for, and verify chains; wide ones
replay all layers first, as a pass does ("replay": this alone). Prompts are one chunk after other tokens. floor: in
rounds one read and one write of the states, in chunks one read and one write of the rows, over the
rate of a copy measured in the same turns. GB/s: the floor's bytes over the time. Tables, then one JSON line.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from aerie.deploy.bench.figures import table
from aerie.kernels.delta_rule.chunks import delta_rule_chunks
from aerie.kernels.delta_rule.rounds import delta_rule_rounds, replay_rows
from aerie.kernels.delta_rule.tables import (
    MAX_TILE_ROWS,
    TAPS,
    AllWeights,
    ChunkTables,
    DeltaHeads,
    DeltaRows,
    DeltaState,
    DeltaWeights,
    RoundTables,
)
from aerie.kernels.kv.batches import causal_mask
from tests.bench.kernels.gpu_time import Clock, captured, hardware
from tests.bench.machine import commit

MODELS = {"27B": DeltaHeads(16, 48, 128, 128), "35B-A3B": DeltaHeads(16, 32, 128, 128)}
APART_BYTES = 400 << 20  # of states, between two uses of the same one
MAX_LAYERS = 32


@dataclass(frozen=True)
class Row:
    """One row of a table. work: "round" of `size` rows a request, "replay" of the committed rows alone before such a
    round, or "chunk" of `size` tokens."""

    model: str
    work: str
    batch: int
    size: int
    us: float
    floor_us: float
    gb_per_s: int


def rows_of(heads: DeltaHeads, count: int, device: torch.device) -> DeltaRows:
    """Views of two products, as a layer has them."""
    values = heads.value_heads * heads.value_dim
    qkvz = torch.randn(count, heads.channels + values, dtype=torch.bfloat16, device=device)
    gates = torch.randn(count, 2 * heads.value_heads, dtype=torch.bfloat16, device=device)
    return DeltaRows(*qkvz.split((heads.channels, values), 1), *gates.chunk(2, 1))


def weights_of(heads: DeltaHeads, device: torch.device) -> DeltaWeights:
    """Random weights; decays from 0.5 to 0.999 a token."""
    conv = torch.randn(TAPS, heads.channels, dtype=torch.bfloat16, device=device) * 0.5
    a_log = torch.empty(heads.value_heads, device=device).uniform_(-4, 1)
    dt_bias = torch.empty(heads.value_heads, device=device).uniform_(-4, 0)
    return DeltaWeights(conv, a_log, dt_bias, torch.ones(heads.value_dim, dtype=torch.bfloat16, device=device), 1e-6)


def state_bytes(heads: DeltaHeads) -> int:
    """Bytes of one request's state in one layer."""
    return heads.value_heads * heads.key_dim * heads.value_dim * 4


def states(heads: DeltaHeads, slots: int, width: int, path: int, device: torch.device) -> DeltaState:
    """As many layers as empty the caches between two uses of one. path: committed rows that there is room for."""
    layers = max(2, min(MAX_LAYERS, APART_BYTES // (slots * state_bytes(heads))))
    kept = DeltaState.zeros(layers, heads, slots, 0, max(width, path), path, torch.bfloat16, device)
    for tensor in (kept.state, kept.conv, kept.committed):
        tensor.normal_(std=0.1)
    kept.count[:slots] = min(width, path - 1)
    return kept


def measured(clock: Clock, model: str, work: str, batch: int, size: int, path: int) -> Row:
    """A row of a table."""
    heads, device = MODELS[model], clock.source.device
    width = 1 if work == "chunk" else size
    kept, weights = states(heads, batch, width, path, device), weights_of(heads, device)
    layers, count = kept.state.shape[0], batch * size
    rows = rows_of(heads, count, device)
    out = torch.empty(count, heads.value_heads * heads.value_dim, dtype=torch.bfloat16, device=device)
    slots = torch.arange(batch, device=device)

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    if work != "chunk":
        nowhere, entries = torch.full_like(kept.count, -1), torch.zeros_like(kept.count, dtype=torch.int64)
        mask = causal_mask(batch, size, device).contiguous()
        tables = RoundTables(slots, int32(*[1000] * batch), mask, nowhere, entries)
        num_bytes = 2 * batch * state_bytes(heads)

        everywhere, of_layers = AllWeights.of([weights] * layers), tables
        if tables.is_wide(path):
            of_layers = replace(tables, replayed=True)

        def run() -> None:
            if of_layers.replayed:
                replay_rows(kept, everywhere, tables)
            for layer in range(layers if work == "round" else 0):
                delta_rule_rounds(rows, weights, kept.layer(layer), of_layers, out)
    else:
        chunk = ChunkTables(slots, int32(0, size), int32(64), int32(-1), slots)
        num_bytes = count * (heads.channels + 2 * heads.value_heads * heads.value_dim) * 2

        def run() -> None:
            for layer in range(layers):
                delta_rule_chunks(rows, weights, kept.layer(layer), chunk, out)

    (us,), rate = clock.medians(captured(run).replay)
    us /= layers
    return Row(model, work, batch, size, round(us, 2), round(num_bytes / rate * 1e6, 2), round(num_bytes / us / 1e3))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--widths", type=int, nargs="*", default=[1, 4, 8, 16])
    parser.add_argument("--path", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    clock = Clock(args.rounds)
    wide = [width for width in args.widths if width > 1 and width + args.path > MAX_TILE_ROWS]
    works = (("round", args.batches, args.widths), ("replay", args.batches, wide), ("chunk", [1], args.tokens))
    found = [
        measured(clock, model, work, batch, size, args.path)
        for model in args.models
        for work, batches, sizes in works
        for batch in batches
        for size in sizes
    ]
    head = ["model", "work", "batch", "rows or tokens", "us", "floor, us", "GB/s"]
    print(*table(head, [tuple(asdict(row).values()) for row in found]), sep="\n")
    results = [asdict(row) for row in found]
    print(json.dumps({"bench": "delta_rule", "hardware": hardware(), "commit": commit(), "results": results}))


if __name__ == "__main__":
    main()
