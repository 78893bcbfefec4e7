# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Divides prompt chunks into the blocks of `chunks_triton`, on the device. A block has up to BLOCK rows, fewer before a
snapshot or the end of its chunk."""

import triton
import triton.language as tl


@triton.jit
def borders(chunk, inside, qo_ptr, starts_ptr, at_ptr):
    """Return each chunk's first row, its number of rows, and its number of rows before the snapshot: 0 if the snapshot
    is at an end of the chunk or outside."""
    first = tl.load(qo_ptr + chunk, mask=inside, other=0)
    rows = tl.load(qo_ptr + chunk + 1, mask=inside, other=0) - first
    border = tl.load(at_ptr + chunk, mask=inside, other=-1) - tl.load(starts_ptr + chunk, mask=inside, other=0)
    return first, rows, tl.where((border > 0) & (border < rows), border, 0)


@triton.jit
def num_blocks(rows, BLOCK: tl.constexpr):
    return (rows + BLOCK - 1) // BLOCK


@triton.jit
def block_rows(j, rows, border, BLOCK: tl.constexpr):
    """Return the first row of a chunk's block j, counted in the chunk, and its number of rows."""
    before = num_blocks(border, BLOCK)
    first = tl.where(j < before, j * BLOCK, border + (j - before) * BLOCK)
    end = tl.where(j < before, border, rows)
    return first, tl.minimum(end - first, BLOCK)


@triton.jit
def first_blocks(qo_ptr, starts_ptr, at_ptr, num_chunks, CHUNKS_PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Return [CHUNKS_PADDED] each: the number of blocks before each chunk, and each chunk's number of blocks."""
    chunks = tl.arange(0, CHUNKS_PADDED)
    _, rows, border = borders(chunks, chunks < num_chunks, qo_ptr, starts_ptr, at_ptr)
    own = num_blocks(border, BLOCK) + num_blocks(rows - border, BLOCK)
    return tl.cumsum(own, 0) - own, own


@triton.jit
def locate(
    index, qo_ptr, starts_ptr, at_ptr, num_chunks, CHUNKS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return block `index`: its chunk, the row where the chunk starts, its first row in the chunk, its rows (or 0)."""
    before, own = first_blocks(qo_ptr, starts_ptr, at_ptr, num_chunks, CHUNKS_PADDED, BLOCK)
    mine = (before <= index) & (index < before + own)
    chunk = tl.sum(tl.where(mine, tl.arange(0, CHUNKS_PADDED), 0), 0)
    j = index - tl.sum(tl.where(mine, before, 0), 0)
    chunk_row, rows, border = borders(chunk, True, qo_ptr, starts_ptr, at_ptr)
    first, count = block_rows(j, rows, border, BLOCK)
    return chunk, chunk_row, first, tl.where(tl.sum(mine.to(tl.int32), 0) > 0, count, 0)
