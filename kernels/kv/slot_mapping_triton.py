# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
"""Kernels of `slot_mapping`: one launch per batch; the references have about ten."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.kv.batches import DecodeBatch, PrefillBatch

BLOCK = 128  # rows per program
CHUNKS = 16  # compared at a time


@triton.jit
def _map_decode_rows(
    prefix_ptr,
    table_ptr,
    table_stride,
    position_ptr,
    slot_ptr,
    first_column,
    page_size,
    ROWS: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
):
    """Write positions and KV slots of a request's ROWS rows; the first is first_column tokens after the prefix.

    prefix_ptr: [requests] tokens before the rows.
    table_ptr: [requests, ..] pages of page_size tokens, table_stride apart.
    position_ptr, slot_ptr: [requests, ROWS] int64, written: position, and token index in the pool.
    """
    b = tl.program_id(0)
    row = tl.arange(0, ROWS_PADDED)
    inside = row < ROWS
    position = tl.load(prefix_ptr + b).to(tl.int64) + first_column + row
    page = tl.load(table_ptr + b * table_stride + position // page_size, mask=inside, other=0).to(tl.int64)
    tl.store(position_ptr + b * ROWS + row, position, mask=inside)
    tl.store(slot_ptr + b * ROWS + row, page * page_size + position % page_size, mask=inside)


@triton.jit(do_not_specialize=["table_stride", "num_chunks", "num_rows", "page_size"])
def _map_prefill_rows(
    indptr_ptr,
    starts_ptr,
    store_from_ptr,
    table_ptr,
    table_stride,
    position_ptr,
    slot_ptr,
    num_chunks,
    num_rows,
    page_size,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    HAS_STORE_FROM: tl.constexpr,
):
    """Write the position and the token index in the pool of BLOCK rows of chunks; 0 for padding.

    indptr_ptr: [num_chunks + 1] first rows.
    starts_ptr: [num_chunks] positions of first rows.
    store_from_ptr: [num_chunks], rows at earlier positions write to page 0; with HAS_STORE_FROM.
    CHUNKS: chunks that are compared at once.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = row * 0
    for low in range(0, num_chunks, CHUNKS):
        c = low + tl.arange(0, CHUNKS)
        end = tl.load(indptr_ptr + 1 + c, mask=c < num_chunks, other=2147483647)
        chunk += tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
    inside = chunk < num_chunks
    start = tl.load(starts_ptr + chunk, mask=inside, other=0)
    position = tl.where(inside, start + row - tl.load(indptr_ptr + chunk, mask=inside, other=0), 0)
    entry = table_ptr + chunk.to(tl.int64) * table_stride + position // page_size
    page = tl.load(entry, mask=inside, other=0).to(tl.int64)
    if HAS_STORE_FROM:
        store_from = tl.load(store_from_ptr + chunk, mask=inside, other=0)
        page = tl.where(position < store_from, 0, page)
    tl.store(position_ptr + row, position.to(tl.int64), mask=row < num_rows)
    slot = tl.where(inside, page * page_size + position % page_size, 0)
    tl.store(slot_ptr + row, slot, mask=row < num_rows)


def map_decode_rows(batch: DecodeBatch, page_size: int) -> tuple[Tensor, Tensor]:
    """Implement `aerie.kernels.kv.slot_mapping.map_decode_rows`: map the rows of a round."""
    positions, slots = _outputs(batch.num_rows, batch.prefix_len.device)
    _map_decode_rows[(batch.num_requests,)](
        batch.prefix_len,
        batch.page_table,
        batch.page_table.stride(0),
        positions,
        slots,
        batch.suffix_len - batch.rows,
        page_size,
        ROWS=batch.rows,
        ROWS_PADDED=triton.next_power_of_2(batch.rows),
        num_warps=1,
    )
    return positions, slots


def map_prefill_rows(batch: PrefillBatch, page_size: int) -> tuple[Tensor, Tensor]:
    """Implement `aerie.kernels.kv.slot_mapping.map_prefill_rows`: map the rows of prompt chunks; padding rows get 0 and
    0."""
    store_from = batch.store_from
    positions, slots = _outputs(batch.num_rows, batch.starts.device)
    _map_prefill_rows[(triton.cdiv(batch.num_rows, BLOCK),)](
        batch.qo_indptr,
        batch.starts,
        batch.starts if store_from is None else store_from,
        batch.page_table,
        batch.page_table.stride(0),
        positions,
        slots,
        batch.num_chunks,
        batch.num_rows,
        page_size,
        BLOCK=BLOCK,
        CHUNKS=CHUNKS,
        HAS_STORE_FROM=store_from is not None,
        num_warps=4,
    )
    return positions, slots


def _outputs(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate both outputs separately, so that both are aligned; Triton compiles a kernel for each alignment."""
    positions, slots = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2))
    return positions, slots


MAX_COLUMNS = 1024  # maximum numbers of a token per program


@triton.jit(do_not_specialize=["table_stride"])
def _move_path(
    k_ptr,
    v_ptr,
    table_ptr,
    length_ptr,
    path_ptr,
    table_stride,
    layer_stride,
    PAGE: tl.constexpr,
    TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO: tl.constexpr,
):
    """Copy the KV of a request's accepted nodes to the positions after its prefix, in one layer.

    k_ptr, v_ptr: [layers, pages, PAGE, TOKEN numbers], layer_stride between layers.
    table_ptr: [requests, table_stride] page table.
    length_ptr: [requests] tokens of the prefix.
    path_ptr: [requests, ROWS] offset of each accepted node from the prefix's end; trailing zeros.
    BLOCK: numbers of a token per program.
    TWO: there are k and v; else only k.
    """
    b, layer, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    row, column = tl.arange(0, ROWS_PADDED), block * BLOCK + tl.arange(0, BLOCK)
    step = tl.load(path_ptr + b * ROWS + row, mask=row < ROWS, other=0)
    # trailing zeros, and nodes already at their index, do not move
    moves = (row < ROWS) & (step > row)
    start = tl.load(length_ptr + b).to(tl.int64)
    table = table_ptr + b * table_stride
    source, target = start + step, start + row
    source = tl.load(table + source // PAGE, mask=moves, other=0).to(tl.int64) * PAGE + source % PAGE
    target = tl.load(table + target // PAGE, mask=moves, other=0).to(tl.int64) * PAGE + target % PAGE
    mask = moves[:, None] & (column < TOKEN)[None, :]
    offset = layer * layer_stride + column[None, :]
    k = tl.load(k_ptr + offset + source[:, None] * TOKEN, mask=mask, other=0)
    if TWO:
        v = tl.load(v_ptr + offset + source[:, None] * TOKEN, mask=mask, other=0)
    # sources and targets overlap: read all before writing any
    tl.debug_barrier()
    tl.store(k_ptr + offset + target[:, None] * TOKEN, k, mask=mask)
    if TWO:
        tl.store(v_ptr + offset + target[:, None] * TOKEN, v, mask=mask)


def move_path(tensors: tuple[Tensor, ...], page_table: Tensor, length: Tensor, path: Tensor) -> None:
    """Implement `aerie.kernels.kv.slot_mapping.move_path`: copy the tokens at positions length[b] + path[b, j] to
    length[b] + j, in place, where path[b, j] > j."""
    # FP8 is copied as bytes, on any GPU
    tensors = tuple(tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor for tensor in tensors)
    k, v = tensors[0], tensors[1] if len(tensors) == 2 else None
    layers, _, page_size = k.shape[:3]
    batch, rows = path.shape
    token = k[0, 0, 0].numel()
    block = min(triton.next_power_of_2(token), MAX_COLUMNS)
    _move_path[(batch, layers, triton.cdiv(token, block))](
        k,
        v,
        page_table,
        length,
        path,
        page_table.stride(0),
        k.stride(0),
        PAGE=page_size,
        TOKEN=token,
        ROWS=rows,
        ROWS_PADDED=triton.next_power_of_2(rows),
        BLOCK=block,
        TWO=v is not None,
        num_warps=4,
    )
