# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernel of `aerie.kernels.sampling.penalties`: one pass over the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.sampling.penalties import FREE, PenaltyTables

BLOCK = 1024


@triton.jit(do_not_specialize=["width", "position_row", "position_column", "nodes"])
def _apply_penalties(
    x_ptr,
    x_stride,
    out_ptr,
    size,
    slot_ptr,
    position_ptr,
    position_row,
    position_column,
    width,
    path_ptr,
    path_token_ptr,
    nodes,
    count_ptr,
    prompt_ptr,
    bias_ptr,
    penalty_ptr,
    penalty_stride,
    min_len_ptr,
    min_len_stride,
    stop_ptr,
    shapes_ptr,
    shapes_stride,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of a row's logits [size] in float32, with its request's penalties and logit bias, and without
    stop tokens before its minimum length.

    slot_ptr: [requests]; a request has `width` rows.
    position_row, position_column: strides of position_ptr.
    path_ptr: [rows, nodes], whether a node is on the row's path.
    path_token_ptr: [requests, nodes], the tokens of the nodes, which count as output.
    count_ptr, prompt_ptr, bias_ptr: [slots, size].
    penalty_ptr: by slot, the presence and frequency penalties, and the repetition penalty - 1.
    min_len_ptr, stop_ptr: by slot, the position from which on its STOPS stop tokens are allowed.
    shapes_ptr: whether the slot has any of these; else logits are copied.
    The other pointers and strides are those of the tensors of `aerie.kernels.sampling.penalties.apply_penalties`.
    """
    row = tl.program_id(0).to(tl.int64)
    request = row // width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    slot = tl.load(slot_ptr + request)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if tl.load(shapes_ptr + slot * shapes_stride) != 0:
        count = tl.load(count_ptr + slot * size + column, mask=inside, other=0)
        for node in range(nodes):
            on_path = tl.load(path_ptr + row * nodes + node)
            token = tl.load(path_token_ptr + request * nodes + node)
            count += ((column == tl.maximum(token, 0)) & (on_path != 0)).to(tl.int32)
        prompt = tl.load(prompt_ptr + slot * size + column, mask=inside, other=0)
        presence = tl.load(penalty_ptr + slot * penalty_stride)
        frequency = tl.load(penalty_ptr + slot * penalty_stride + 1)
        factor = tl.load(penalty_ptr + slot * penalty_stride + 2) + 1.0
        repeated = tl.where(x > 0, x / factor, x * factor)
        x = tl.where((count > 0) | (prompt != 0), repeated, x)
        x = tl.fma(count.to(tl.float32), -frequency, x) - tl.where(count > 0, presence, 0.0)
        x += tl.load(bias_ptr + slot * size + column, mask=inside, other=0.0)
        position = tl.load(position_ptr + request * position_row + row % width * position_column)
        if position < tl.load(min_len_ptr + slot * min_len_stride):
            for i in range(STOPS):
                x = tl.where(column == tl.load(stop_ptr + slot * STOPS + i), float("-inf"), x)
    tl.store(out_ptr + row * size + column, x, mask=inside)


def apply_penalties(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    tables: PenaltyTables,
    path: Tensor | None = None,
    path_tokens: Tensor | None = None,
) -> Tensor:
    """Implement `aerie.kernels.sampling.penalties.apply_penalties`: return logits with penalties, biases and min_tokens
    applied (OpenAI's presence and frequency penalty; the repetition penalty of arXiv 1909.05858, section 4.1).

    path: ancestors of each row in a tree, which count as output. path_tokens: tokens of the tree's nodes.
    """
    rows, size = logits.shape
    counts, prompt, bias = tables.output_counts, tables.in_prompt, tables.bias
    out = torch.empty((rows, size), dtype=torch.float32, device=logits.device)
    shapes, prompt = tables.shapes_logits.view(torch.int8), prompt.view(torch.int8)
    nodes = 0 if path is None else path.shape[2]
    on_path = prompt if path is None else path.contiguous().view(torch.int8)
    tokens = slots if path_tokens is None else path_tokens.contiguous()
    _apply_penalties[(rows, triton.cdiv(size, BLOCK))](
        logits,
        logits.stride(0),
        out,
        size,
        slots,
        positions,
        *positions.stride(),
        positions.shape[1],
        on_path,
        tokens,
        nodes,
        counts,
        prompt,
        bias,
        tables.penalties,
        tables.penalties.stride(0),
        tables.min_len,
        tables.min_len.stride(0),
        tables.stop_ids,
        shapes,
        shapes.stride(0),
        STOPS=tables.stop_ids.shape[1],
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


MASK_BLOCK = 4096  # logits per program of `_apply_masks`


@triton.jit(do_not_specialize=["width", "first"])
def _apply_masks(
    x_ptr,
    x_stride,
    size,
    slot_ptr,
    index_ptr,
    word_ptr,
    num_words,
    width,
    first,
    FREE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set BLOCK logits of a row to minus infinity where the request's mask forbids the token.

    x_ptr: [rows, size] logits of the tokens from `first` on, x_stride between rows.
    slot_ptr: slots of the requests, which have `width` rows each.
    index_ptr: [slots] row of word_ptr that is the request's first mask; FREE without masks.
    word_ptr: [masks, num_words] int32, a bit per token.
    """
    row = tl.program_id(0).to(tl.int64)
    base = tl.load(index_ptr + tl.load(slot_ptr + row // width))
    if base != FREE:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        token = column + first
        inside = (column < size) & (token < 32 * num_words)
        mask = base + row % width
        word = tl.load(word_ptr + mask * num_words + token // 32, mask=inside, other=0)
        forbidden = (word >> (token % 32) & 1) == 0
        nothing = tl.full([BLOCK], float("-inf"), tl.float32).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_stride + column, nothing, mask=inside & forbidden)


def apply_masks(logits: Tensor, slots: Tensor, index: Tensor, words: Tensor, first: int) -> None:
    """Implement `aerie.kernels.sampling.penalties.apply_masks`: set the logits of forbidden tokens to minus
    infinity.

    index: each slot's first row of `words`, the masks with one bit a token. first: token id of the first column.
    """
    rows, size = logits.shape
    _apply_masks[(rows, triton.cdiv(size, MASK_BLOCK))](
        logits,
        logits.stride(0),
        size,
        slots,
        index,
        words,
        words.shape[1],
        rows // slots.shape[0],
        first,
        FREE=FREE,
        BLOCK=MASK_BLOCK,
        num_warps=4,
    )
