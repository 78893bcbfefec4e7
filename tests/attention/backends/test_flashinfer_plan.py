"""The cuts and packed masks that FlashInfer's kernels read, as written on the device, against the same written with
loops: on a GPU, or small cases under Triton's interpreter (TRITON_INTERPRET=1). The library's own plans are compared on
a GPU whenever the backend first meets a kind of pass (`aerie.attention.backends.flashinfer_backend`)."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

from aerie.kernels.attend.flashinfer_plan_triton import (  # noqa: E402
    MIN_PIECE_TOKENS,
    Grid,
    PlanArrays,
    mask_bytes,
    write_mask,
    write_plan,
)
from tests.support.kernels.triton_interpreter import DEVICE, INTERPRETED, MARKS  # noqa: E402

pytestmark = MARKS
LENGTHS = [(0,), (1, 17, 63, 200, 1021, 0, 0), (5000, 1, 30, 777), (40,) * 12]
WIDTH = 400  # pages of a row of the table


def planned(grid: Grid, lengths: list[int]) -> dict[str, list[int]]:
    """Return what FlashInfer's scheduler says of these lengths: the smallest pieces that find room."""
    pages = [-(-length // grid.page_size) for length in lengths]
    size = max(MIN_PIECE_TOKENS // grid.page_size, 1)
    if not grid.splits:
        size = max([size, *pages])
    while sum(-(-n // size) for n in pages) * grid.tiles > grid.room and size < max(pages):
        size += 1
    tiles = [
        (request, qo_tile, kv_tile)
        for request, n in enumerate(pages)
        for qo_tile in range(grid.tiles)
        for kv_tile in range(-(-n // size))
    ]
    o_indptr, merge_indptr = [0], [0]
    for n in pages:
        pieces = -(-n // size)
        o_indptr.append(o_indptr[-1] + grid.rows * pieces)
        for _ in range(grid.rows):
            merge_indptr.append(merge_indptr[-1] + pieces)
    spare = grid.padded - len(tiles)
    assert spare >= 0
    request, qo_tile, kv_tile = ([*column, *[0] * spare] for column in zip(*tiles, strict=True))
    return {
        "request": request,
        "qo_tile": qo_tile,
        "kv_tile": kv_tile,
        "o_indptr": o_indptr,
        "kv_chunk_size": [size * grid.page_size],
        "total_num_rows": [grid.num_requests * grid.rows],
        "merge_indptr": merge_indptr,
        "block_valid": [1] * len(tiles) + [0] * spare,
    }


@pytest.mark.parametrize(
    ("prefixes", "page_size", "rows", "tiles", "room"),
    [
        pytest.param(prefixes, page_size, *grid, marks=() if (i + j) % 4 == 0 and k == i % 2 else pytest.mark.slow)
        for i, prefixes in enumerate(LENGTHS)
        for j, grid in enumerate(((1, 1, 33), (6, 2, 33), (6, 2, 9), (3, 1, 4)))
        for k, page_size in enumerate((1, 16))
    ],
)
def test_cuts_are_those_of_the_scheduler(
    prefixes: tuple[int, ...], page_size: int, rows: int, tiles: int, room: int
) -> None:
    grid = Grid(len(prefixes), rows, tiles, room, page_size)
    arrays = PlanArrays(grid, DEVICE)
    last_page_len = torch.zeros(len(prefixes), dtype=torch.int32, device=DEVICE)
    write_plan(arrays, torch.tensor(prefixes, dtype=torch.int32, device=DEVICE), rows, WIDTH, last_page_len)
    lengths = [n + rows for n in prefixes]
    for name, values in planned(grid, lengths).items():
        assert arrays.values(name).tolist() == values, name
    assert [(WIDTH - 1) * page_size + n for n in last_page_len.tolist()] == lengths


def test_arrays_begin_at_16_bytes_and_hold_what_was_last_cut() -> None:
    grid = Grid(3, 2, 1, 10, 16)
    arrays = PlanArrays(grid, DEVICE)
    assert all(arrays.byte(name) % 16 == 0 for name in arrays.begin)
    last = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    for prefixes in ([900, 0, 0], [0, 0, 0]):
        write_plan(arrays, torch.tensor(prefixes, dtype=torch.int32, device=DEVICE), 2, WIDTH, last)
        assert arrays.values("block_valid").tolist() == planned(grid, [n + 2 for n in prefixes])["block_valid"]


@pytest.mark.parametrize(("rows", "suffix_len"), [(6, 6), (3, 9), (40, 40)])
def test_packed_masks_show_each_row_its_prefix_and_its_columns(rows: int, suffix_len: int) -> None:
    torch.manual_seed(0)
    prefixes = [1, 17, 0, 40 if INTERPRETED else 3000]
    mask = torch.randint(0, 1 << suffix_len, (4, rows), dtype=torch.int64, device=DEVICE)
    packed = torch.full((4, mask_bytes(rows, max(prefixes) + suffix_len)), 170, dtype=torch.uint8, device=DEVICE)
    write_mask(packed, mask, torch.tensor(prefixes, dtype=torch.int32, device=DEVICE), suffix_len)
    for b, prefix in enumerate(prefixes):
        length = prefix + suffix_len
        bits = (packed[b].unsqueeze(1) >> torch.arange(8, device=DEVICE) & 1).flatten()[: rows * length]
        seen = bits.view(rows, length).long()
        assert seen[:, :prefix].all()
        assert torch.equal(seen[:, prefix:], mask[b].unsqueeze(1) >> torch.arange(suffix_len, device=DEVICE) & 1)


def test_a_mask_of_one_copy_for_all_requests() -> None:
    """As `causal_mask` makes them: a view without own memory per request."""
    mask = torch.tensor([1, 3], device=DEVICE).expand(2, 2)
    packed = torch.zeros((2, mask_bytes(2, 10)), dtype=torch.uint8, device=DEVICE)
    write_mask(packed, mask, torch.tensor([2, 0], dtype=torch.int32, device=DEVICE), 2)
    assert packed[:, 0].tolist() == [0b11110111, 0b1101]
