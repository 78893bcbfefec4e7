"""KV positions of a pass's rows, and the token indices in the pool that the rows write. After a round `move_path` moves
the KV of an accepted path to the front of its tree, where the committed KV ends."""

import torch
from torch import Tensor

from aerie.kernels.kv.batches import DecodeBatch, PrefillBatch, token_indices
from aerie.kernels.operation import Implementation, on_gpu, operation


def map_rows(batch: DecodeBatch | PrefillBatch, page_size: int) -> tuple[Tensor, Tensor]:
    """Call `map_decode_rows` or `map_prefill_rows`, without a device sync."""
    return map_decode_rows(batch, page_size) if isinstance(batch, DecodeBatch) else map_prefill_rows(batch, page_size)


def _check_decode(batch: DecodeBatch, page_size: int) -> None:
    table, prefix_len = batch.page_table, batch.prefix_len
    assert table.dim() == 2 and table.stride(1) == 1 and table.dtype == prefix_len.dtype == torch.int32
    assert prefix_len.shape == table.shape[:1] and prefix_len.is_contiguous()
    assert 1 <= batch.rows <= batch.suffix_len


def _check_prefill(batch: PrefillBatch, page_size: int) -> None:
    table, starts = batch.page_table, batch.starts
    assert table.dim() == 2 and table.stride(1) == 1 and table.dtype == torch.int32
    assert starts.shape == table.shape[:1] and batch.qo_indptr.shape == (starts.shape[0] + 1,)
    for tensor in (
        (batch.qo_indptr, starts) if batch.store_from is None else (batch.qo_indptr, starts, batch.store_from)
    ):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()


@operation(
    Implementation("triton", "aerie.kernels.kv.slot_mapping_triton:map_decode_rows", on_gpu), contract=_check_decode
)
def map_decode_rows(batch: DecodeBatch, page_size: int) -> tuple[Tensor, Tensor]:
    """Map the rows of a round.

    ->  positions     [B * R] int64, KV positions in the request
        slot_mapping  [B * R] int64, page * page_size + offset
    """
    positions = batch.kv_positions()
    return positions.flatten(), token_indices(batch.page_table, positions, page_size).flatten()


@operation(
    Implementation("triton", "aerie.kernels.kv.slot_mapping_triton:map_prefill_rows", on_gpu),
    contract=_check_prefill,
)
def map_prefill_rows(batch: PrefillBatch, page_size: int) -> tuple[Tensor, Tensor]:
    """Map the rows of prompt chunks; padding rows get 0 and 0. Rows before `store_from` write to page 0.

    ->  positions     [num_rows] int64, KV positions in the request
        slot_mapping  [num_rows] int64, page * page_size + offset
    """
    chunk = batch.row_chunks()
    inside = chunk < batch.num_chunks
    chunk = chunk.clamp_max(batch.num_chunks - 1)
    row = torch.arange(batch.num_rows, device=chunk.device)
    positions = torch.where(inside, batch.starts[chunk] + row - batch.qo_indptr[chunk], 0)
    pages = batch.page_table[chunk, positions // page_size].long()
    if batch.store_from is not None:
        pages = torch.where(positions < batch.store_from[chunk], 0, pages)
    return positions, torch.where(inside, pages * page_size + positions % page_size, 0)


def _are_alike(tensors: tuple[Tensor, ...], *_: object) -> bool:
    return len(tensors) <= 2 and tensors[0].shape == tensors[-1].shape and tensors[0].dtype == tensors[-1].dtype


def _check(tensors: tuple[Tensor, ...], page_table: Tensor, length: Tensor, path: Tensor) -> None:
    for tensor in tensors:
        assert tensor.is_contiguous() and tensor.shape[:3] == tensors[0].shape[:3]
    assert page_table.dim() == 2 and page_table.stride(1) == 1 and page_table.dtype == length.dtype == torch.int32
    assert length.shape == page_table.shape[:1] == path.shape[:1] and length.is_contiguous()
    assert path.dim() == 2 and path.dtype == torch.int64 and path.is_contiguous()


@operation(
    Implementation(
        "triton",
        "aerie.kernels.kv.slot_mapping_triton:move_path",
        on_gpu,
        _are_alike,
        "one tensor, or two of the same shape and type",
    ),
    contract=_check,
)
def move_path(tensors: tuple[Tensor, ...], page_table: Tensor, length: Tensor, path: Tensor) -> None:
    """Copy the tokens at positions length[b] + path[b, j] to length[b] + j, in place, where path[b, j] > j.

    Reads all tokens before it writes any, because sources and targets overlap.

    tensors     each [layers, pages, page_size, ...] of any dtype, contiguous, written
    page_table  [B, max_pages] int32, last stride 1
    length      [B] int32
    path        [B, D] int64, contiguous; zeros after a path's end, which move nothing
    """
    row = torch.arange(path.shape[1], device=path.device)
    start, page_size = length.long().unsqueeze(1), tensors[0].shape[2]
    source = token_indices(page_table, start + torch.maximum(path, row), page_size).flatten()
    target = token_indices(page_table, start + row.expand_as(path), page_size).flatten()
    for tensor in tensors:
        if tensor.dtype.itemsize == 1:
            tensor = tensor.view(torch.uint8)  # the only 8-bit dtype that torch 2.13 copies by index

        tokens = tensor.view(tensor.shape[0], -1, *tensor.shape[3:])
        tokens.index_copy_(1, target, tokens.index_select(1, source))
