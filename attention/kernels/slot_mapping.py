# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Where the rows of a `DecodeBatch` are written and where they stand, in one launch instead of about ten. Called by
`workers.layers.forward_context` on GPUs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.metadata import DecodeBatch, decode_slot_mapping


@triton.jit
def _decode_rows(
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
    b = tl.program_id(0)
    row = tl.arange(0, ROWS_PADDED)
    inside = row < ROWS
    position = tl.load(prefix_ptr + b).to(tl.int64) + first_column + row
    page = tl.load(table_ptr + b * table_stride + position // page_size, mask=inside, other=0).to(tl.int64)
    tl.store(position_ptr + b * ROWS + row, position, mask=inside)
    tl.store(slot_ptr + b * ROWS + row, page * page_size + position % page_size, mask=inside)


def decode_rows(batch: DecodeBatch, page_size: int) -> tuple[Tensor, Tensor]:
    """KV positions and the pool's token indices that the rows of `batch` write, [B * R] int64 each."""
    assert batch.page_table.stride(1) == 1 and batch.prefix_len.is_contiguous()
    positions, slots = torch.empty((2, batch.num_rows), dtype=torch.int64, device=batch.prefix_len.device).unbind(0)
    _decode_rows[(batch.num_requests,)](
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


def reference(batch: DecodeBatch, page_size: int) -> tuple[Tensor, Tensor]:
    """The same in torch."""
    return batch.kv_positions().flatten(), decode_slot_mapping(batch, page_size)
