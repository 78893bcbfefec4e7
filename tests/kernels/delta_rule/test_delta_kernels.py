"""The kernels of the gated delta rule over whole lives of slots, and beside neighbours: on a GPU, or a few small cases
under the interpreter. Shapes and types: `tests.kernels.ops.delta_rule_cases`."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.kernels.delta_rule import chunks_triton, tables  # noqa: E402
from aerie.kernels.delta_rule.chunks import delta_rule_chunks, scratch_bytes  # noqa: E402
from aerie.kernels.delta_rule.rounds import delta_rule_rounds  # noqa: E402
from aerie.kernels.delta_rule.tables import DeltaHeads, DeltaRows, RoundTables  # noqa: E402
from tests.kernels.ops.delta_rule_cases import BATCHES, RAGGED, SMALL, chunk_arguments, round_arguments  # noqa: E402
from tests.support.kernels.delta_rule import DeltaLives  # noqa: E402
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS, kernels_of_operations  # noqa: E402
from tests.support.slow import slow  # noqa: E402

pytestmark = MARKS
HEADS = SMALL if INTERPRETED else DeltaHeads(2, 4, 128, 128)
WIDE = DeltaHeads(1, 1, 128, 128)


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with kernels_of_operations():
        yield


WAYS = {"one launch": (64, False), "two launches": (8, False), "replayed before the layers": (8, True)}


@pytest.mark.parametrize("way", slow(*WAYS) if INTERPRETED else WAYS)
@pytest.mark.parametrize("seed", range(1 if INTERPRETED else 20))
def test_lives_of_slots_are_the_recurrence(seed: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, within 2e-4 of the largest number: the last norm enlarges small outputs' rounding by up to 100. More
    rows than fit in a tile take two launches, of which the first may replay all layers."""
    most_rows, ahead = WAYS[way]
    monkeypatch.setattr(tables, "MAX_TILE_ROWS", most_rows)
    rng = random.Random(seed)
    lives = DeltaLives(HEADS, torch.float32, rng, 2e-4, DEVICE, ahead=ahead)
    lives.run_chunks([(0, 70 if not INTERPRETED else 66), (1, 2)], 3)
    lives.run_chunks([(0, 0), (1, 65 if not INTERPRETED else 5)])
    for width in (5, 1, 8):
        lives.run_round([1, 0], width, 1)
    del lives.lives[1], lives.length[1]
    lives.run_chunks([(1, 3)])
    lives.finish()


def _run_alone(arguments: tuple[Any, ...], request: int, width: int) -> Tensor:
    rows, weights, kept, together, out = arguments
    one, mine = slice(request, request + 1), slice(request * width, (request + 1) * width)
    alone = RoundTables(
        together.slots[one], together.prefix_len[one], together.mask[one], together.snapshot_at, together.snapshot_entry
    )
    delta_rule_rounds(rows.part(mine.start, mine.stop), weights, kept, alone, out[mine])
    return out[mine]


def test_a_request_is_the_same_beside_others() -> None:
    width, dtype = 4, torch.bfloat16
    together = round_arguments(HEADS, BATCHES[1], width, dtype)(DEVICE)
    delta_rule_rounds(*together)
    for request in (0, 3):
        alone = round_arguments(HEADS, BATCHES[1], width, dtype)(DEVICE)
        out = _run_alone(alone, request, width)
        slot = BATCHES[1][request]
        assert torch.equal(out, together[4][request * width : (request + 1) * width])
        assert torch.equal(alone[2].state[slot], together[2].state[slot])


@pytest.mark.parametrize("heads", [SMALL, *(slow(WIDE) if INTERPRETED else [WIDE])], ids=["16x16", "128x128"])
def test_chunks_keep_what_plans_count(heads: DeltaHeads, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = RAGGED[0]
    arguments, made = chunk_arguments(heads, chunks, 3, torch.bfloat16)(DEVICE), []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: made.append(empty(*args, **options)) or made[-1])
    chunks_triton.delta_rule_chunks(*arguments)
    expected = scratch_bytes(heads, torch.bfloat16, arguments[-1].shape[0], len(chunks))
    assert sum(each.nbytes for each in made) == expected


class Recorded:
    """A kernel that is not launched. seen: what each of its launches would be compiled for."""

    def __init__(self) -> None:
        self.seen: set[tuple[tuple[str, Any], ...]] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **constants: self.seen.add(tuple(sorted(constants.items())))


def test_a_start_compiles_chunks_for_any_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt, as a start runs it, compiles what up to eight take; more take one other kernel up to 64."""
    kernels = {name: Recorded() for name in ("_convolve", "_solve", "_advance", "_finish")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(chunks_triton, name, kernel)
    rows, weights, kept, one, out = chunk_arguments(SMALL, ((0, 3, 0),), 0, torch.bfloat16)(DEVICE)
    for counts, variants in ((range(1, 9), 1), (range(9, 65), 2)):
        for count in counts:
            chunks = replace(one, slots=torch.zeros(count, dtype=torch.int64, device=DEVICE))
            chunks_triton.delta_rule_chunks(rows, weights, kept, chunks, out)
        assert [len(kernel.seen) for kernel in kernels.values()] == [variants] * 4


def test_a_chunk_is_the_same_beside_others() -> None:
    chunks = RAGGED[0]
    rows, weights, kept, all_chunks, out = chunk_arguments(HEADS, chunks, 3, torch.bfloat16)(DEVICE)
    delta_rule_chunks(rows, weights, kept, all_chunks, out)
    other, _, kept_alone, _, out_alone = chunk_arguments(HEADS, chunks, 3, torch.bfloat16)(DEVICE)
    first, last = 2, 3
    begin = int(all_chunks.qo_indptr[first])
    alone = replace(
        all_chunks,
        slots=all_chunks.slots[first:last],
        qo_indptr=all_chunks.qo_indptr[first : last + 1] - begin,
        starts=all_chunks.starts[first:last],
        snapshot_at=all_chunks.snapshot_at[first:last],
        snapshot_entry=all_chunks.snapshot_entry[first:last],
    )
    mine: DeltaRows = other.part(begin, other.qkv.shape[0])
    delta_rule_chunks(mine, weights, kept_alone, alone, out_alone[begin:])
    assert torch.equal(out_alone[begin:], out[begin:])
    assert torch.equal(kept_alone.state[first], kept.state[first])
