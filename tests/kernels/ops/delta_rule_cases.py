"""`aerie.kernels.delta_rule`: rounds of one row to wide trees, ragged prompt chunks, and the commit between them;
NaN wherever nothing may be read."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.delta_rule.chunks import delta_rule_chunks
from aerie.kernels.delta_rule.rounds import commit_rows, delta_rule_rounds, replay_rows
from aerie.kernels.delta_rule.tables import AllWeights, ChunkTables, DeltaHeads, DeltaState, RoundTables
from tests.kernels.ops.case import TYPES, Case
from tests.support.kernels.delta_rule import RandomTree, random_rows, random_weights

SLOTS, PATH = 4, 5
COUNTS = [PATH, 0, 1, 3]  # committed rows of the slots
SMALL = DeltaHeads(1, 2, 16, 16)
GROUPS = (SMALL, DeltaHeads(2, 2, 16, 32), DeltaHeads(1, 3, 32, 16))
QWEN = DeltaHeads(1, 3, 128, 128)
MANY = DeltaHeads(8, 24, 128, 128)  # no two programs per head with BATCHES[1]
Arguments = Callable[[torch.device], tuple[Any, ...]]


def _kept(
    heads: DeltaHeads,
    width: int,
    counts: list[int],
    dtype: torch.dtype,
    device: torch.device,
    saved_dtype: torch.dtype = torch.float32,
) -> DeltaState:
    """Numbers in what the slots may read of two layers, zeros in the padding slot, and NaN in everything else."""
    kept = DeltaState.zeros(2, heads, SLOTS, 3, max(width, PATH), PATH, dtype, device, saved_dtype)
    generator = torch.Generator().manual_seed(width)
    for tensor in (kept.state, kept.conv, kept.pending, kept.committed):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    kept.state.mul_(0.3)
    for slot, count in enumerate(counts):
        kept.committed[:, slot, count:] = torch.nan
    kept.state[:, SLOTS], kept.conv[:, SLOTS] = 0, 0
    for tensor in (kept.saved_state, kept.saved_conv):
        tensor.fill_(torch.nan)
    kept.committed[:, SLOTS] = torch.nan
    kept.count[:SLOTS] = torch.tensor(counts)
    return kept


def _out(rows: int, heads: DeltaHeads, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((rows, heads.value_heads * heads.value_dim), torch.nan, dtype=dtype, device=device)


def round_arguments(
    heads: DeltaHeads,
    batch: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    saved_dtype: torch.dtype = torch.float32,
    fixed: bool = False,
    replayed: bool = False,
) -> Arguments:
    """counts of 0, 1, and a whole path; a snapshot before, amid and after the replayed rows."""
    counts = COUNTS

    def arguments(device: torch.device) -> tuple[Any, ...]:
        rng = random.Random(width)
        masks = [RandomTree.draw(rng, width, min(width, 20)).masks for _ in batch]
        lengths = torch.tensor([counts[slot] + 7 + slot if slot < SLOTS else 0 for slot in batch], dtype=torch.int32)
        at = torch.tensor([9, 8, -1, 99, -1], dtype=torch.int32)  # after 2 of 5 rows; before the first; later
        entries = torch.tensor([1, 0, 0, 0, 0])
        tables = RoundTables(
            torch.tensor(batch).to(device),
            lengths.to(device),
            torch.tensor(masks).to(device),
            at.to(device),
            entries.to(device),
            fixed,
            replayed,
        )
        rows = random_rows(heads, len(batch) * width, dtype, device, width)
        kept = _kept(heads, width, counts, dtype, device, saved_dtype)
        out = _out(len(batch) * width, heads, dtype, device)
        return rows, random_weights(heads, dtype, device), kept.layer(1), tables, out

    return arguments


def replay_arguments(
    heads: DeltaHeads, batch: tuple[int, ...], dtype: torch.dtype, saved_dtype: torch.dtype = torch.float32
) -> Arguments:
    def arguments(device: torch.device) -> tuple[Any, ...]:
        of_round = round_arguments(heads, batch, 30, dtype, saved_dtype)(device)
        weights = [random_weights(heads, dtype, device, seed) for seed in range(2)]
        return _kept(heads, 30, COUNTS, dtype, device, saved_dtype), AllWeights.of(weights), of_round[3]

    return arguments


def chunk_arguments(
    heads: DeltaHeads,
    chunks: tuple[tuple[int, int, int], ...],
    padding: int,
    dtype: torch.dtype,
    saved_dtype: torch.dtype = torch.float32,
    fixed: bool = False,
) -> Arguments:
    """chunks: start, rows, and rows before the snapshot (0 for none)."""

    def arguments(device: torch.device) -> tuple[Any, ...]:
        starts, counts, borders = zip(*chunks, strict=True)
        kept = _kept(heads, 1, [0] * SLOTS, dtype, device, saved_dtype)
        for c, start in enumerate(starts):
            if start == 0:
                kept.state[:, c], kept.conv[:, c] = torch.nan, torch.nan
        ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
        at = [start + border if border else -1 for start, border in zip(starts, borders, strict=True)]
        int32 = (torch.tensor(each, dtype=torch.int32, device=device) for each in (ends, starts, at))
        entries = torch.arange(len(chunks), device=device)
        tables = ChunkTables(torch.arange(len(chunks), device=device), *int32, entries, fixed)
        total = ends[-1] + padding
        rows = random_rows(heads, total, dtype, device, total)
        return rows, random_weights(heads, dtype, device), kept.layer(1), tables, _out(total, heads, dtype, device)

    return arguments


def _commit(device: torch.device) -> tuple[Any, ...]:
    kept = _kept(SMALL, 7, COUNTS, torch.bfloat16, device)
    path = torch.tensor([[0, 2, 6], [0, 1, 0], [0, 0, 0], [0, 0, 0]], device=device)
    counts = torch.tensor([3, 2, 0, 1], dtype=torch.int32, device=device)
    return kept, torch.tensor([2, 0, 3, SLOTS], device=device), path, counts


def _name(heads: DeltaHeads, dtype: torch.dtype) -> str:
    return f"{heads.key_heads}-{heads.value_heads}-{heads.key_dim}x{heads.value_dim}-{str(dtype)[6:]}"


# The last norm enlarges the rounding of outputs that almost cancel; a bfloat16 convolution may round the other way.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-4}
BATCHES = ((0,), (2, 0, SLOTS, 3, 1))  # one padding request: several write the rows of one slot, in any order
RAGGED = ((0, 5, 5), (9, 0, 0), (3, 70, 2)), ((0, 130, 65),), ((64, 64, 64),), ((0, 1, 0), (1, 1, 1))
LONG = (4096, 900, 512), (0, 0, 0), (0, 400, 0)

CASES = (
    *(
        Case(delta_rule_rounds, f"{len(batch)}-{width}-{_name(heads, dtype)}",
             round_arguments(heads, batch, width, dtype), (2, 4), tolerance=TOLERANCES[dtype], slow=slow)
        for heads, dtype, batch, width, slow in (
            *((SMALL, dtype, batch, width, False) for dtype in TYPES for batch in BATCHES for width in (1, 4)),
            *((heads, torch.float32, BATCHES[1], 8, heads is GROUPS[1]) for heads in GROUPS[1:]),
            *((QWEN, torch.float32, BATCHES[0], width, False) for width in (3, 8)),  # few rows, several parts
            *((QWEN, torch.bfloat16, BATCHES[1], width, True) for width in (2, 3, 8, 9)),  # few rows in CUDA C++
            *((SMALL, dtype, BATCHES[1], width, True) for dtype in TYPES for width in (16, 17, 32, 60)),
            *((QWEN, dtype, batch, width, True) for dtype in TYPES for batch in BATCHES for width in (1, 4, 16, 60)),
        )
    ),
    *(
        Case(delta_rule_rounds, f"replayed-{len(batch)}-{width}-{_name(heads, dtype)}",
             round_arguments(heads, batch, width, dtype, replayed=True), (2, 4), tolerance=TOLERANCES[dtype], slow=slow)
        for heads, dtype, batch, width, slow in (
            (SMALL, torch.float32, BATCHES[1], 28, False),
            (GROUPS[1], torch.bfloat16, BATCHES[1], 32, False),  # two programs per head
            *((QWEN, dtype, batch, width, True) for dtype in TYPES for batch in BATCHES for width in (28, 32, 60)),
            *((MANY, dtype, BATCHES[1], 32, True) for dtype in TYPES),
        )
    ),
    *(
        Case(replay_rows, f"{len(batch)}-{_name(heads, dtype)}-saved-{str(saved)[6:]}",
             replay_arguments(heads, batch, dtype, saved), (0,), tolerance=TOLERANCES[dtype], slow=slow)
        for heads, dtype, saved, batch, slow in (
            (SMALL, torch.float32, torch.float32, BATCHES[1], False),
            (GROUPS[2], torch.bfloat16, torch.bfloat16, BATCHES[1], False),
            *((QWEN, dtype, torch.float32, BATCHES[1], True) for dtype in TYPES),
        )
    ),
    *(
        Case(delta_rule_chunks, f"{len(chunks)}-{sum(n for _, n, _ in chunks)}-{_name(heads, dtype)}",
             chunk_arguments(heads, chunks, 3, dtype), (2, 4), tolerance=TOLERANCES[dtype], slow=slow)
        for heads, dtype, chunks, slow in (
            *((SMALL, torch.float32, chunks, False) for chunks in RAGGED),
            *((heads, torch.bfloat16, RAGGED[0], heads is GROUPS[2]) for heads in GROUPS[1:]),
            *((QWEN, dtype, chunks, True) for dtype in TYPES for chunks in (*RAGGED, LONG)),
        )
    ),
    *(
        Case(delta_rule_rounds, f"bfloat16-snapshots-{width}",
             round_arguments(SMALL, BATCHES[1], width, torch.bfloat16, torch.bfloat16), (2, 4), tolerance=2.0**-4)
        for width in (1, 4)
    ),
    *(
        Case(delta_rule_rounds, f"fixed-{width}-{_name(heads, dtype)}",
             round_arguments(heads, BATCHES[1], width, dtype, fixed=True), (2, 4),
             tolerance=TOLERANCES[dtype], slow=slow)
        for heads, dtype, width, slow in (
            *((SMALL, torch.float32, width, False) for width in (1, 5)),
            *((GROUPS[2], torch.bfloat16, width, width > 1) for width in (1, 8)),
            *((QWEN, dtype, width, True) for dtype in TYPES for width in (1, 4, 8, 60)),
        )
    ),
    *(
        Case(delta_rule_chunks, f"fixed-{len(chunks)}-{sum(n for _, n, _ in chunks)}-{_name(heads, dtype)}",
             chunk_arguments(heads, chunks, 3, dtype, fixed=True), (2, 4), tolerance=TOLERANCES[dtype], slow=slow)
        for heads, dtype, chunks, slow in (
            (SMALL, torch.float32, RAGGED[0], False),
            (GROUPS[1], torch.bfloat16, RAGGED[3], False),
            *((QWEN, dtype, chunks, True) for dtype in TYPES for chunks in RAGGED),
        )
    ),
    Case(delta_rule_chunks, "bfloat16-snapshots",
         chunk_arguments(SMALL, RAGGED[0], 3, torch.bfloat16, torch.bfloat16), (2, 4), tolerance=2.0**-4),
    Case(commit_rows, "paths", _commit, (0,), exact=True),
)  # fmt: skip
