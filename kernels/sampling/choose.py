"""Samples one token per row: filters, temperature, Gumbel noise, argmax.

argmax(logits / temperature + Gumbel noise) is an exact sample of the softmax (the Gumbel-max trick).
"""

import torch
from torch import Tensor

from aerie.kernels.contracts import check_slots
from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.sampling.filters import Limits, gaps
from aerie.kernels.sampling.gumbel import Draws
from aerie.kernels.vocabulary.largest import finite_choice


def _check(logits: Tensor, draws: Draws, first: int, limits: Limits | None = None) -> None:
    check_slots(draws.slots)
    assert logits.dim() == 2 and logits.stride(1) == 1 and logits.is_floating_point()
    for each in () if limits is None else (limits.peaks, limits.gaps):
        assert each.shape == logits.shape[:1] and each.is_contiguous()


@operation(Implementation("triton", "aerie.kernels.sampling.choose_triton:choose", on_gpu), contract=_check)
def choose(logits: Tensor, draws: Draws, first: int, limits: Limits | None = None) -> tuple[Tensor, Tensor]:
    """Return each row's largest perturbed logit and its column; the largest logit for greedy rows.

    logits  [B * R, n], any floating dtype, last stride 1
    first   token id of the first column
    limits  limits of the filters; None without filters
    ->      [B * R] float32; [B * R] int64, the smallest column among equals. Rows with a NaN or plus infinity get
            NOT_FINITE and a value that is not finite.

    The kernel computes logarithms in float32, this reference in float64, so near ties they may sample different tokens.
    """
    logits = logits.float()
    if limits is not None:
        temperature = draws.temperature[draws.slots].repeat_interleave(draws.positions.shape[1])
        gap = gaps(logits, torch.where(temperature > 0, temperature, 1.0), limits.peaks)
        logits = logits.masked_fill(gap > limits.gaps.unsqueeze(1), float("-inf"))
    ids = torch.arange(first, first + logits.shape[1], device=logits.device)
    value, column = draws.perturbed(logits, ids).max(-1)
    return value, finite_choice(value, column)
