# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of `block_head`: one launch each instead of about ten."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aerie.kernels.pdl import pdl_wait

BLOCK = 1024  # channels per program


@triton.jit(do_not_specialize=["rows"])
def _convolve_blocks(
    x_ptr,
    base_ptr,
    dynamic_ptr,
    dynamic_stride,
    out_ptr,
    rows,
    channels,
    groups,
    GROUP: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convolve a block of channels of one row with the rows before it in its block of `rows` rows.

    base_ptr: [TAPS, channels].
    dynamic_ptr: each row's [TAPS, groups], added to the taps of GROUP channels each.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        if row % rows >= tap:
            x = tl.load(x_ptr + (row - tap) * channels + channel, mask=inside, other=0.0).to(tl.float32)
            kernel = tl.load(base_ptr + tap * channels + channel, mask=inside, other=0.0).to(tl.float32)
            tap_ptr = dynamic_ptr + row * dynamic_stride + tap * groups + channel // GROUP
            total += x * (kernel + tl.load(tap_ptr, mask=inside, other=0.0).to(tl.float32))
    tl.store(out_ptr + row * channels + channel, total.to(out_ptr.dtype.element_ty), mask=inside)


def convolve_blocks(x: Tensor, base: Tensor, dynamic: Tensor, rows: int) -> Tensor:
    """Implement `aerie.kernels.drafting.block_head.convolve_blocks`: return the causal convolution over the rows of
    each block.

    base, dynamic: the taps are the sum of a learnt part and of each row's own part.
    """
    (count, channels), (_, taps, groups) = x.shape, dynamic.shape
    out = torch.empty_like(x)
    _convolve_blocks[(count, triton.cdiv(channels, BLOCK))](
        x,
        base,
        dynamic,
        dynamic.stride(0),
        out,
        rows,
        channels,
        groups,
        GROUP=channels // groups,
        TAPS=taps,
        BLOCK=BLOCK,
        num_warps=4,
        **pdl_wait(x.device),
    )
    return out


@triton.jit(do_not_specialize=["depths", "row", "width"])
def _score_candidates(
    unary_ptr,
    candidate_ptr,
    projected_ptr,
    depths,
    row,
    previous_ptr,
    width,
    before_ptr,
    after_ptr,
    score_ptr,
    id_ptr,
    n,
    rank,
    N: tl.constexpr,
    RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the scores of one entry's n candidates at depth `row`: unary_ptr plus the product of the embeddings [rank]
    of the previous token (before_ptr) and of the candidate (after_ptr), with the depth's factor projected_ptr.

    unary_ptr, candidate_ptr: [requests, depths, n]; a request has `width` entries.
    projected_ptr: [requests, depths, rank], or None.
    previous_ptr: [entries] rows of before_ptr [.., rank].
    after_ptr: [vocabulary, rank].
    score_ptr, id_ptr: [entries, n], written.
    N, RANK: n and rank, padded.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    entry = tl.program_id(0).to(tl.int64)
    cell = entry // width * depths + row
    column, part = tl.arange(0, N), tl.arange(0, RANK)
    inside, there = column < n, part < rank
    token = tl.load(candidate_ptr + cell * n + column, mask=inside, other=0)
    previous = tl.load(previous_ptr + entry)
    first = tl.load(before_ptr + previous * rank + part, mask=there, other=0.0).to(tl.float32)
    if projected_ptr is not None:
        first *= tl.load(projected_ptr + cell * rank + part, mask=there, other=0.0).to(tl.float32)
    seen = inside[:, None] & there[None, :]
    second = tl.load(after_ptr + token[:, None] * rank + part[None, :], mask=seen, other=0.0).to(tl.float32)
    score = tl.load(unary_ptr + cell * n + column, mask=inside, other=0.0) + tl.sum(second * first[None, :], 1)
    tl.store(score_ptr + entry * n + column, score, mask=inside)
    tl.store(id_ptr + entry * n + column, token, mask=inside)


def score_candidates(
    unary: Tensor,
    candidates: Tensor,
    projected: Tensor | None,
    row: int,
    previous: Tensor,
    before: Tensor,
    after: Tensor,
) -> tuple[Tensor, Tensor]:
    """Implement `aerie.kernels.drafting.block_head.score_candidates`: return scores of a row's candidates after each of
    k nodes, and the candidates' ids.

    unary: scores of the candidates by the block alone.
    before, previous: vectors of nodes, and each node's row of them. projected: factor of the row on these vectors.
    """
    (_, depths, n), rank, count = unary.shape, before.shape[1], previous.numel()
    scores = torch.empty((count, n), dtype=torch.float32, device=unary.device)
    ids = torch.empty((count, n), dtype=torch.int64, device=unary.device)
    _score_candidates[(count,)](
        unary,
        candidates,
        projected,
        depths,
        row,
        previous,
        previous.shape[1],
        before,
        after,
        scores,
        ids,
        n,
        rank,
        N=triton.next_power_of_2(n),
        RANK=triton.next_power_of_2(rank),
        num_warps=4,
        **pdl_wait(unary.device),
    )
    return scores, ids


@triton.jit
def _gru_step(input_ptr, hidden_ptr, state_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """One step of a GRU (arXiv 1406.1078, as in torch.nn.GRUCell).

    input_ptr, hidden_ptr: [rows, 3 * size] products of the input and of the state: reset gate, update gate, candidate.
    state_ptr, out_ptr: [rows, size] state before and after.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = row * 3 * size + column
    reset = tl.load(input_ptr + gate, mask=inside, other=0.0).to(tl.float32)
    reset += tl.load(hidden_ptr + gate, mask=inside, other=0.0).to(tl.float32)
    update = tl.load(input_ptr + gate + size, mask=inside, other=0.0).to(tl.float32)
    update += tl.load(hidden_ptr + gate + size, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(input_ptr + gate + 2 * size, mask=inside, other=0.0).to(tl.float32)
    state_part = tl.load(hidden_ptr + gate + 2 * size, mask=inside, other=0.0).to(tl.float32)
    new += state_part / (1.0 + tl.exp(-reset))
    new = 2.0 / (1.0 + tl.exp(-2.0 * new)) - 1.0
    state = tl.load(state_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    state = new + (state - new) / (1.0 + tl.exp(-update))
    tl.store(out_ptr + row * size + column, state.to(out_ptr.dtype.element_ty), mask=inside)


def gru_step(inputs: Tensor, hidden: Tensor, state: Tensor) -> Tensor:
    """Implement `aerie.kernels.drafting.block_head.gru_step`: return the next states [n, S] of a gated recurrent unit
    without biases (torch.nn.GRU).

    inputs, hidden: [n, 3 S], contiguous: inputs and states times their weights; gates reset, update and new.
    state: [n, S], contiguous.
    """
    out = torch.empty_like(state)
    rows, size = state.shape
    _gru_step[(rows, triton.cdiv(size, BLOCK))](inputs, hidden, state, out, size, BLOCK=BLOCK, num_warps=4)
    return out
