# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel of `move_path`: one launch; the reference has sixteen."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


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
    """`aerie.kernels.kv.move_path.move_path`."""
    # FP8 is copied as bytes, on any GPU
    tensors = tuple(tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor for tensor in tensors)
    k, v = tensors[0], tensors[1] if len(tensors) == 2 else None
    layers, _, page_size = k.shape[:3]
    batch, rows = path.shape
    token = k[0, 0, 0].numel()
    block = min(triton.next_power_of_2(token), BLOCK)
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
