"""Moves the KV of an accepted path to the front of its tree, where the committed KV ends."""

import torch
from torch import Tensor

from aerie.kernels.kv.batches import token_indices
from aerie.kernels.operation import Implementation, on_gpu, operation


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
        "aerie.kernels.kv.move_path_triton:move_path",
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
