# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Cuts prompt chunks into tiles of adjacent rows, on the device. Tiles with the longest contexts come first, so that
the last programs are short. The grid is fixed at capture; unused tiles are marked idle."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.kv.batches import ChunkLists, PrefillBatch

# Fields of a tile: chunk or IDLE; first row; end of the chunk's rows; position of the first row.
TILE_FIELDS = tl.constexpr(4)
IDLE = tl.constexpr(-1)  # in place of the chunk: an unused tile
BLOCK = 64  # tiles per program
CHUNKS = 16  # compared at a time


@triton.jit
def _chunks_at(indptr_ptr, starts_ptr, low, num_chunks, rows, CHUNKS: tl.constexpr):
    """Return index, first row, end, position and number of tiles of chunks low .. low + CHUNKS - 1, [1, CHUNKS] each;
    missing chunks have no tiles.

    indptr_ptr: [num_chunks + 1] first row of each chunk, and the last one's end.
    starts_ptr: [num_chunks] position of the first row.
    rows: rows of a tile.
    """
    c = low + tl.arange(0, CHUNKS)[None, :]
    there = c < num_chunks
    first = tl.load(indptr_ptr + c, mask=there, other=0)
    end = tl.load(indptr_ptr + c + 1, mask=there, other=0)
    return c, first, end, tl.load(starts_ptr + c, mask=there, other=0), tl.cdiv(end - first, rows)


@triton.jit(do_not_specialize=["num_chunks", "num_tiles", "rows"])
def _plan_tiles(
    indptr_ptr,
    starts_ptr,
    tiles_ptr,
    num_chunks,
    num_tiles,
    rows,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Write the fields of BLOCK tiles of `rows` rows each: chunk, first and last row, position; tiles with the longest
    context first.

    indptr_ptr, starts_ptr, num_chunks: see `_chunks_at`. CHUNKS: chunks that are compared at once.
    tiles_ptr: [num_tiles, TILE_FIELDS] int32, written; IDLE after the last tile.
    """
    tile = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    chunk, first, end, position = tile * 0, tile * 0, tile * 0, tile * 0
    total = 0
    for low in range(0, num_chunks, CHUNKS):
        c, first_row, end_row, start, count = _chunks_at(indptr_ptr, starts_ptr, low, num_chunks, rows, CHUNKS)
        ends = total + tl.cumsum(count, 1)
        mine = (ends - count <= tile) & (tile < ends)
        before = (tile - ends + count) * rows  # rows of the chunk that are in earlier tiles
        chunk += tl.sum(tl.where(mine, c, 0), 1)[:, None]
        first += tl.sum(tl.where(mine, first_row + before, 0), 1)[:, None]
        end += tl.sum(tl.where(mine, end_row, 0), 1)[:, None]
        position += tl.sum(tl.where(mine, start + before, 0), 1)[:, None]
        total += tl.sum(count)
    # A tile's index is the number of tiles with a longer context, plus those of earlier chunks with an equal one.
    place = tile * 0
    for low in range(0, num_chunks, CHUNKS):
        c, _, _, start, count = _chunks_at(indptr_ptr, starts_ptr, low, num_chunks, rows, CHUNKS)
        ahead = position - start
        shorter = tl.where(ahead >= 0, tl.minimum(tl.maximum(ahead, 0) // rows + 1, count), 0)  # or as long
        as_long = (ahead >= 0) & (tl.maximum(ahead, 0) % rows == 0) & (ahead < count * rows) & (c < chunk)
        place += tl.sum(count - shorter + as_long.to(tl.int32), 1)[:, None]
    used, there = tile < total, tile < num_tiles
    item = tiles_ptr + tl.where(used, place, tile) * TILE_FIELDS
    tl.store(item, tl.where(used, chunk, IDLE), mask=there)
    tl.store(item + 1, first, mask=there)
    tl.store(item + 2, end, mask=there)
    tl.store(item + 3, position, mask=there)


def max_tiles(batch: PrefillBatch, rows: int) -> int:
    """Return the number of tiles of `rows` rows for the batch; an upper bound if only the device knows the chunks."""
    if batch.lists is not None:
        return sum(triton.cdiv(count, rows) for count in batch.lists.counts)
    return min(batch.num_rows, batch.num_rows // rows + batch.num_chunks)


def plan_tiles(batch: PrefillBatch, rows: int) -> Tensor:
    """Return the tiles of `rows` adjacent rows, [tiles, TILE_FIELDS] int32: the longest context first, idle tiles last.

    Launches one small kernel; reads nothing on the host.
    """
    num_tiles = max_tiles(batch, rows)
    assert batch.qo_indptr.is_contiguous() and batch.starts.is_contiguous()
    tiles = torch.empty((num_tiles, TILE_FIELDS.value), dtype=torch.int32, device=batch.starts.device)
    _plan_tiles[(triton.cdiv(num_tiles, BLOCK),)](
        batch.qo_indptr,
        batch.starts,
        tiles,
        batch.num_chunks,
        num_tiles,
        rows,
        BLOCK=BLOCK,
        CHUNKS=CHUNKS,
        num_warps=4,
    )
    return tiles


def reference(lists: ChunkLists, rows: int) -> list[list[int]]:
    """Return the tiles of `plan_tiles` without idle ones."""
    tiles, row = [], 0
    for chunk, (start, count) in enumerate(zip(lists.starts, lists.counts, strict=True)):
        tiles += [[chunk, row + done, row + count, start + done] for done in range(0, count, rows)]
        row += count
    return sorted(tiles, key=lambda tile: -tile[3])
