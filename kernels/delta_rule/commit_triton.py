# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of `commit_rows`: one launch for the rows of all layers, then one for the counts, which it reads."""

import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.delta_rule.tables import DeltaState

BLOCK = 512  # numbers of a row per program


@triton.jit
def _commit_rows(
    conv_ptr, pending_ptr, committed_ptr, count_ptr, slots_ptr, path_ptr, counts_ptr,
    padding_slot, conv_stride, pending_stride, committed_stride, path_stride,
    DEPTH: tl.constexpr, DEPTH_PADDED: tl.constexpr, PENDING: tl.constexpr, PATH: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, layer, request = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot = tl.load(slots_ptr + request)
    if slot != padding_slot:
        column = block * BLOCK + tl.arange(0, BLOCK)
        i, j = tl.arange(0, 4), tl.arange(0, DEPTH_PADDED)
        conv_ptr += layer * conv_stride + slot * (3 * C)
        pending_ptr += layer * pending_stride + slot * (PENDING * R)
        committed_ptr += layer * committed_stride + slot * (PATH * R)
        index = tl.load(count_ptr + slot) + i
        old, folded = (i < 3) & (index < 3), (i < 3) & (index >= 3)
        place = conv_ptr + index[:, None] * C + column[None, :]
        history = tl.load(place, mask=old[:, None] & (column < C)[None, :], other=0.0)
        place = committed_ptr + (index - 3)[:, None] * R + column[None, :]
        newer = tl.load(place, mask=folded[:, None] & (column < C)[None, :], other=0.0)
        history = tl.where(old[:, None], history, newer)
        moves = j < tl.load(counts_ptr + request)
        node = tl.load(path_ptr + request * path_stride + j, mask=moves & (j < DEPTH), other=0)
        moved = moves[:, None] & (column < R)[None, :]
        rows = tl.load(pending_ptr + node[:, None] * R + column[None, :], mask=moved, other=0.0)
        # read the old committed rows before new ones overwrite them
        tl.debug_barrier()
        tl.store(conv_ptr + i[:, None] * C + column[None, :], history, mask=(i < 3)[:, None] & (column < C)[None, :])
        tl.store(committed_ptr + j[:, None] * R + column[None, :], rows, mask=moved)


@triton.jit
def _set_counts(count_ptr, slots_ptr, counts_ptr, batch, padding_slot, BLOCK: tl.constexpr):
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + request, mask=request < batch, other=padding_slot)
    counts = tl.load(counts_ptr + request, mask=request < batch, other=0)
    tl.store(count_ptr + slot, counts.to(tl.int32), mask=slot != padding_slot)


def commit_rows(kept: DeltaState, slots: Tensor, path: Tensor, counts: Tensor) -> None:
    """`aerie.kernels.delta_rule.commit.commit_rows`."""
    heads, (batch, depth) = kept.heads, path.shape
    layers = kept.conv.shape[0]
    _commit_rows[(triton.cdiv(heads.row_size, BLOCK), layers, batch)](
        kept.conv, kept.pending, kept.committed, kept.count, slots, path, counts,
        kept.padding_slot, kept.conv.stride(0), kept.pending.stride(0), kept.committed.stride(0), path.stride(0),
        DEPTH=depth, DEPTH_PADDED=triton.next_power_of_2(depth), PENDING=kept.pending.shape[2],
        PATH=kept.committed.shape[2], C=heads.channels, R=heads.row_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    _set_counts[(triton.cdiv(batch, 128),)](kept.count, slots, counts, batch, kept.padding_slot, BLOCK=128, num_warps=4)
