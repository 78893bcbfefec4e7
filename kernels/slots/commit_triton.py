# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel of `aerie.kernels.slots.commit`: one launch; the reference has about thirty. Acceptance
(`aerie.kernels.tree.acceptance_triton`) shares its functions."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.slots.commit import CommitTables
from aerie.kernels.slots.finish import FINISH_LENGTH, FINISH_NOT_FINITE, FINISH_STOP


@triton.jit
def settle(
    slot,
    length,
    count,
    first_stop,
    last,
    seq_len_ptr,
    bonus_ptr,
    bonus_stride,
    max_len_ptr,
    max_len_stride,
    finished_ptr,
    finished_stride,
    STOP: tl.constexpr,
    LENGTH: tl.constexpr,
    NOT_FINITE: tl.constexpr,
):
    """Commit `count` tokens up to the first stop token. Return the number of committed tokens and the finish reason.

    length: committed tokens of the slot before.
    seq_len_ptr: [slots] int32 committed tokens, written.
    bonus_ptr: newest token by slot, bonus_stride apart, written.
    max_len_ptr: maximum tokens by slot, max_len_stride apart.
    finished_ptr: by slot, finished_stride apart: whether the request has ended, read and written.
    STOP, LENGTH, NOT_FINITE: values of the finish reason.
    first_stop: index of the first stop token, at least `count` if there is none.
    last: the last token; negative if logits were not finite.
    """
    max_len = tl.load(max_len_ptr + slot * max_len_stride)
    was_finished = tl.load(finished_ptr + slot * finished_stride).to(tl.int1)
    stopped = first_stop < count
    count = tl.where(stopped, first_stop + 1, count)
    count = tl.where(was_finished, 0, count)
    finish = tl.where(stopped, STOP, tl.where(length + count + 1 >= max_len, LENGTH, 0))
    broken = (last < 0) & (count > 0)
    count = tl.where(broken, count - 1, count)
    finish = tl.where(broken, NOT_FINITE, finish)
    finish = tl.where(was_finished, 0, finish)
    # Padding rows use the padding slot, which is always finished: they store the values already there.
    tl.store(seq_len_ptr + slot, (length + count).to(tl.int32))
    tl.store(bonus_ptr + slot * bonus_stride, tl.maximum(last, 0), mask=was_finished == 0)
    tl.store(finished_ptr + slot * finished_stride, (was_finished | (finish > 0)).to(tl.int8))
    return count, finish


@triton.jit
def count_output(slot, token, valid, output_count_ptr, vocab_size, shapes_ptr, shapes_stride):
    """Count a token as output if `shapes_logits` is set for the slot; other requests cost one load."""
    counts = valid & (tl.load(shapes_ptr + slot * shapes_stride) != 0)
    # atomic: a round may emit a token twice, and different threads may do its scalar stores
    tl.atomic_add(output_count_ptr + slot * vocab_size + token, 1, mask=counts, sem="relaxed")


def counting_arguments(output_counts: Tensor, shapes_logits: Tensor) -> tuple[Any, ...]:
    """Return the arguments of `count_output` for output_counts [S, vocab] int32 and shapes_logits [S] bool."""
    shapes = shapes_logits.view(torch.int8)
    return output_counts, output_counts.shape[1], shapes, shapes.stride(0)


@triton.jit
def _commit_one(
    slot_ptr,
    token_ptr,
    seq_len_ptr,
    bonus_ptr,
    bonus_stride,
    max_len_ptr,
    max_len_stride,
    finished_ptr,
    finished_stride,
    stop_ptr,
    output_count_ptr,
    vocab_size,
    shapes_ptr,
    shapes_stride,
    count_ptr,
    finish_ptr,
    STOPS: tl.constexpr,
    STOP: tl.constexpr,
    LENGTH: tl.constexpr,
    NOT_FINITE: tl.constexpr,
):
    """Commit one request's token, if its slot may take one more; see `settle`.

    token_ptr: [requests], negative if logits were not finite; 0 is written in its place.
    slot_ptr: [requests] int64.
    stop_ptr: [slots, STOPS] stop tokens.
    output_count_ptr .. shapes_stride: see `count_output`.
    count_ptr, finish_ptr: [requests], written: committed tokens and finish reasons.
    """
    b = tl.program_id(0)
    slot, token = tl.load(slot_ptr + b), tl.load(token_ptr + b)
    length = tl.load(seq_len_ptr + slot).to(tl.int64)
    left = tl.load(max_len_ptr + slot * max_len_stride) - length - 1
    stops = tl.load(stop_ptr + slot * STOPS + tl.arange(0, STOPS))
    first_stop = tl.where(tl.max((stops == token).to(tl.int32), 0) > 0, 0, 1).to(tl.int64)
    count, finish = settle(
        slot,
        length,
        tl.minimum(left, 1),
        first_stop,
        token,
        seq_len_ptr,
        bonus_ptr,
        bonus_stride,
        max_len_ptr,
        max_len_stride,
        finished_ptr,
        finished_stride,
        STOP,
        LENGTH,
        NOT_FINITE,
    )
    tl.store(token_ptr + b, tl.maximum(token, 0))
    count_output(slot, token, count > 0, output_count_ptr, vocab_size, shapes_ptr, shapes_stride)
    tl.store(count_ptr + b, count)
    tl.store(finish_ptr + b, finish)


def commit_one(slots: Tensor, tokens: Tensor, counts: Tensor, tables: CommitTables) -> tuple[Tensor, Tensor]:
    """Implement `aerie.kernels.slots.commit.commit` for one token per request: append it to the slot, and return the
    number of committed tokens and the finish reason of each request."""
    counts, finish = torch.empty((2, slots.shape[0]), dtype=torch.int64, device=slots.device).unbind(0)
    flags = tables.finished.view(torch.int8)
    _commit_one[(slots.shape[0],)](
        slots,
        tokens,
        tables.seq_len,
        tables.bonus,
        tables.bonus.stride(0),
        tables.max_len,
        tables.max_len.stride(0),
        flags,
        flags.stride(0),
        tables.stop_ids,
        *counting_arguments(tables.output_counts, tables.shapes_logits),
        counts,
        finish,
        STOPS=tables.stop_ids.shape[1],
        STOP=FINISH_STOP,
        LENGTH=FINISH_LENGTH,
        NOT_FINITE=FINISH_NOT_FINITE,
        num_warps=1,
    )
    return counts, finish
