"""The four kernels of a prompt chunk of a recurrent layer on a GPU: by tiles, and whether equal runs give equal bits.

    python -m tests.bench delta_chunks [--models 27B 35B-A3B] [--tokens 8192] [--runs 50]

First table: microseconds a layer of each kernel, for the tiles in use and for others; `error` is the largest difference
from the tiles in use, relative to the largest output. Second table, by sizes of heads and type: runs whose state or
output differs in any bit from the first run's, and the largest errors of a run against the reference, relative to its
largest number. Tables, then one JSON line.
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aerie.deploy.bench.figures import table
from aerie.kernels.delta_rule.chunks import delta_rule_chunks
from aerie.kernels.delta_rule.tables import ChunkTables
from tests.bench.kernels.delta_rule import MODELS, rows_of, states, weights_of
from tests.bench.kernels.gpu_time import hardware
from tests.bench.machine import commit
from tests.bench.trace import by_kernel, profiled
from tests.kernels.ops.delta_rule_cases import GROUPS, QWEN, RAGGED, chunk_arguments

KERNELS = ("_convolve", "_solve", "_advance", "_finish")
CHANGES: tuple[dict[str, int], ...] = (
    {},
    {"stages": 3},
    {"part": 16},
    {"part": 16, "stages": 3},
    {"part": 64},
    {"part": 64, "stages": 3},
    {"part": 64, "advance": 8, "stages": 3},
    {"solve": 4, "finish": 4},
)


@dataclass(frozen=True)
class Tiles:
    """Microseconds of each kernel with some tiles, and their error. why: it did not run."""

    model: str
    tokens: int
    tiles: str
    us: dict[str, float]
    error: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Equality:
    """state, out: largest errors of any run, relative to the reference's largest number."""

    sizes: str
    dtype: str
    runs: int
    different: int
    state: float
    out: float


def timed(model: str, tokens: int, changes: dict[str, int], expected: Tensor | None) -> tuple[Tiles, Tensor]:
    """One row of the first table, and the output."""
    from aerie.kernels.delta_rule import chunks_triton

    heads, device = MODELS[model], torch.device("cuda")
    torch.manual_seed(0)
    kept, weights, rows = states(heads, 1, 1, device), weights_of(heads, device), rows_of(heads, tokens, device)
    out = torch.empty(tokens, heads.value_heads * heads.value_dim, dtype=torch.bfloat16, device=device)

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    slots = torch.zeros(1, dtype=torch.int64, device=device)
    chunk = ChunkTables(slots, int32(0, tokens), int32(64), int32(-1), slots)
    tiles = replace(chunks_triton.chunk_tiles(heads.value_dim), **changes)
    run = partial(chunks_triton.delta_rule_chunks, rows, weights, kept.layer(0), chunk, out, tiles)
    run()
    first = out.clone()
    found = dict(by_kernel(profiled(run, 5)))  # one after the other, so each as long as it runs
    us = {name: round(statistics.median(times), 1) for name, times in found.items() if name in KERNELS}
    error = 0.0 if expected is None else float((first - expected).abs().max() / expected.abs().max())
    return Tiles(model, tokens, str(changes or "in use"), us, round(error, 5)), first


def swept(model: str, tokens: int) -> list[Tiles]:
    """The first table's rows of a model."""
    rows, expected = [], None
    for changes in CHANGES:
        try:
            row, out = timed(model, tokens, changes, expected)
            expected = out if expected is None else expected
        except Exception as error:  # tiles that do not compile or do not fit
            row = Tiles(model, tokens, str(changes), {}, why=f"{type(error).__name__}: {error}"[:120])
        rows.append(row)
    return rows


def equality(arguments: Any, device: torch.device, runs: int, sizes: str, dtype: torch.dtype) -> Equality:
    """A row of the second table. arguments: builds the operands of `delta_rule_chunks`."""
    expected = arguments(device)
    delta_rule_chunks.reference(*expected)
    first, different, errors = None, 0, [0.0, 0.0]
    for _ in range(runs):
        operands = arguments(device)
        delta_rule_chunks(*operands)
        found = operands[2].state, operands[4]
        for i, (ours, theirs) in enumerate(zip(found, (expected[2].state, expected[4]), strict=True)):
            off = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()
            errors[i] = max(errors[i], float(off))
        first = first or found
        different += not all(torch.equal(mine, its) for mine, its in zip(found, first, strict=True))
    return Equality(sizes, str(dtype)[6:], runs, different, *(round(each, 5) for each in errors))


def equalities(device: torch.device, runs: int) -> list[Equality]:
    """The second table."""
    return [
        equality(
            chunk_arguments(heads, RAGGED[0], 3, dtype), device, runs, f"{heads.key_dim} x {heads.value_dim}", dtype
        )
        for heads in (*GROUPS, QWEN)
        for dtype in (torch.bfloat16, torch.float32)
    ]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=["27B"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--runs", type=int, default=50)
    args = parser.parse_args()
    rows = [row for model in args.models for tokens in args.tokens for row in swept(model, tokens)]
    head = ["model", "tokens", "tiles", *(f"{name[1:]}, us" for name in KERNELS), "all, us", "error", ""]
    cells = [
        (
            r.model,
            r.tokens,
            r.tiles,
            *(r.us.get(name, "") for name in KERNELS),
            round(sum(r.us.values())),
            r.error,
            r.why,
        )
        for r in rows
    ]
    print(*table(head, cells), sep="\n")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    equal = equalities(device, args.runs)
    print(
        *table(["sizes", "type", "runs", "different", "state", "out"], [tuple(asdict(e).values()) for e in equal]),
        sep="\n",
    )
    results = {"tiles": [asdict(row) for row in rows], "equality": [asdict(each) for each in equal]}
    print(json.dumps({"bench": "delta_chunks", "hardware": hardware(), "commit": commit(), "results": results}))


if __name__ == "__main__":
    main()
