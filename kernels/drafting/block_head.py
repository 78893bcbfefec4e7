"""Operations of block heads besides their layers: convolutions over the rows of a block (DFlash2), scores of candidates
(DFlash2's selector, biases of DSpark and Domino), and a step of a recurrent unit (Domino). Definitions: z-lab's code of
DFlash2, torch's GRU."""

import torch
from torch import Tensor

from aerie.kernels.operation import Implementation, on_gpu, operation


def _check_convolution(x: Tensor, base: Tensor, dynamic: Tensor, rows: int) -> None:
    assert x.dim() == 2 and x.is_contiguous() and x.shape[0] % rows == 0
    assert base.shape == (dynamic.shape[1], x.shape[1]) and base.is_contiguous()
    assert dynamic.shape[0] == x.shape[0] and x.shape[1] % dynamic.shape[2] == 0
    assert dynamic.stride(2) == 1 and dynamic.stride(1) == dynamic.shape[2]
    assert base.dtype == dynamic.dtype == x.dtype


@operation(
    Implementation("triton", "aerie.kernels.drafting.block_head_triton:convolve_blocks", on_gpu),
    contract=_check_convolution,
)
def convolve_blocks(x: Tensor, base: Tensor, dynamic: Tensor, rows: int) -> Tensor:
    """Return the causal convolution over the rows of each block: row r is the sum over taps t <= r of
    (base[t] + dynamic[row, t]) * x[row - t], in float32.

    x        [B * rows, channels], contiguous
    base     [taps, channels], contiguous, as x: the learnt part of the kernels
    dynamic  [B * rows, taps, groups], as x; the last two dimensions contiguous: each row's part, shared by groups of
             neighbouring channels
    ->       [B * rows, channels], as x
    """
    count, channels = x.shape
    taps = base.shape[0]
    kernels = base.float() + dynamic.float().repeat_interleave(channels // dynamic.shape[2], dim=2)
    blocks = torch.nn.functional.pad(x.float().view(-1, rows, channels), (0, 0, taps - 1, 0))
    last = taps - 1
    shifted = torch.stack([blocks[:, last - tap : last - tap + rows] for tap in range(taps)], dim=2)
    return (shifted.reshape(count, taps, channels) * kernels).sum(1).to(x.dtype)


def _check_scores(
    unary: Tensor,
    candidates: Tensor,
    projected: Tensor | None,
    row: int,
    previous: Tensor,
    before: Tensor,
    after: Tensor,
) -> None:
    assert unary.dim() == 3 and unary.dtype == torch.float32 and unary.is_contiguous() and 0 <= row < unary.shape[1]
    assert candidates.shape == unary.shape and candidates.dtype == torch.int64 and candidates.is_contiguous()
    if projected is not None:
        assert projected.shape[:2] == unary.shape[:2] and projected.is_contiguous()
        assert projected.shape[2] == before.shape[1] and projected.dtype == before.dtype
    assert previous.shape[0] == unary.shape[0] and previous.dtype == torch.int64 and previous.is_contiguous()
    assert before.dim() == after.dim() == 2 and before.shape[1] == after.shape[1]
    assert before.is_contiguous() and after.is_contiguous() and before.dtype == after.dtype


@operation(
    Implementation("triton", "aerie.kernels.drafting.block_head_triton:score_candidates", on_gpu),
    contract=_check_scores,
)
def score_candidates(
    unary: Tensor,
    candidates: Tensor,
    projected: Tensor | None,
    row: int,
    previous: Tensor,
    before: Tensor,
    after: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return scores of a row's candidates after each of k nodes, and the candidates' ids: unary[:, row] +
    <before[previous] * projected[:, row], after[candidate]>, in float32.

    unary       [B, depths, n] float32, contiguous
    candidates  [B, depths, n] int64, contiguous: token ids
    projected   [B, depths, rank], contiguous, as before; None: 1
    previous    [B, k] int64, contiguous: the row of `before` of each node, for example its token
    before      [any, rank], contiguous: vectors of nodes
    after       [vocabulary, rank], contiguous, as before: vectors of candidates
    ->          [B * k, n] float32; [B * k, n] int64
    """
    k = previous.shape[1]
    mine, ids = (part[:, row].repeat_interleave(k, dim=0) for part in (unary, candidates))
    first = before[previous.flatten()].float()
    if projected is not None:
        first = first * projected[:, row].float().repeat_interleave(k, dim=0)
    return mine + (first.unsqueeze(1) * after[ids].float()).sum(-1), ids


def _check_gru(inputs: Tensor, hidden: Tensor, state: Tensor) -> None:
    assert state.dim() == 2 and state.is_contiguous() and state.is_floating_point()
    assert inputs.shape == hidden.shape == (state.shape[0], 3 * state.shape[1])
    assert inputs.is_contiguous() and hidden.is_contiguous() and inputs.dtype == hidden.dtype == state.dtype


@operation(Implementation("triton", "aerie.kernels.drafting.block_head_triton:gru_step", on_gpu), contract=_check_gru)
def gru_step(inputs: Tensor, hidden: Tensor, state: Tensor) -> Tensor:
    """Return the next states of a gated recurrent unit without biases (torch.nn.GRU), in float32.

    inputs  [n, 3 S], contiguous: the inputs times the input weights; gates reset, update and new
    hidden  [n, 3 S], contiguous, as inputs: the states times the hidden weights
    state   [n, S], contiguous, as inputs
    ->      [n, S], as inputs
    """
    input_parts, state_parts = (part.float().chunk(3, dim=1) for part in (inputs, hidden))
    reset, update = (torch.sigmoid(input_parts[gate] + state_parts[gate]) for gate in (0, 1))
    new = torch.tanh(input_parts[2] + reset * state_parts[2])
    return (new + update * (state.float() - new)).to(state.dtype)
