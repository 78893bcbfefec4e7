# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""`aerie.kernels.lora.embedding` on GPUs: a launch that reads the columns of A, and the second launch of
`aerie.kernels.lora.product_triton`, which multiplies them by B."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.lora.product import LoraTables
from aerie.kernels.lora.product_triton import expand
from aerie.kernels.pdl import pdl_wait

_BLOCK_M = 16  # rows of a program


@triton.jit(do_not_specialize=["rows"])
def _lora_columns(
    id_ptr,
    down_ptr,
    index_ptr,
    part_ptr,
    rows,
    V: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Read the column of A of each row's id and adapter: BLOCK_M rows and BLOCK_R ranks. Zero for ids
    outside of A.

    id_ptr: int64 columns.
    down_ptr: [max_loras, RANK, V], A of each adapter.
    index_ptr: each row's index, -1 without an adapter; its row of the result is zero.
    part_ptr: [rows, RANK] float32.
    """
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    ids = tl.load(id_ptr + m, mask=m < rows, other=-1)
    indices = tl.load(index_ptr + m, mask=m < rows, other=-1)
    there = ((indices >= 0) & (ids >= 0) & (ids < V))[:, None]
    columns = down_ptr + (indices.to(tl.int64)[:, None] * RANK + r[None, :]) * V + ids[:, None]
    values = tl.load(columns, mask=there, other=0.0)
    tl.store(part_ptr + m[:, None] * RANK + r[None, :], values.to(tl.float32), mask=(m < rows)[:, None])


def columns(ids: Tensor, tables: LoraTables, lora_indices: Tensor) -> Tensor:
    """Return each row's column of A: [1, rows, max_rank] float32, as the one partial sum that `expand` adds."""
    (rows,), (_, rank, size) = ids.shape, tables.down.shape
    part = torch.empty((1, rows, rank), dtype=torch.float32, device=ids.device)
    block_r = next(width for width in (64, 32, 16) if rank % width == 0)
    _lora_columns[(rank // block_r, triton.cdiv(rows, _BLOCK_M))](
        ids,
        tables.down,
        lora_indices,
        part,
        rows,
        V=size,
        RANK=rank,
        BLOCK_M=_BLOCK_M,
        BLOCK_R=block_r,
        num_warps=4,
        **pdl_wait(ids.device),
    )
    return part


def add_lora_embedding(y: Tensor, ids: Tensor, tables: LoraTables, lora_indices: Tensor) -> Tensor:
    """Implement `aerie.kernels.lora.embedding.add_lora_embedding`."""
    if not y.shape[0]:
        return y
    return expand(y, columns(ids, tables, lora_indices), tables, lora_indices)
