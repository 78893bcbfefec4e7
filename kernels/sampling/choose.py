"""Samples one token per row: filters, temperature, Gumbel noise, argmax; and log-probabilities of the most likely
tokens.

argmax(logits / temperature + Gumbel noise) is an exact sample of the softmax (the Gumbel-max trick). The noise is a
hash of (seed, position, token id), so a sampled token depends only on the preceding text."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.contracts import check_slots
from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.sampling.filters import Limits, gaps
from aerie.kernels.vocabulary.topk_log_softmax import finite_choice

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, odd, as a signed integer
_MIX_1, _MIX_2 = -49064778989728563, -4265267296055464877  # multipliers of the hash that makes the noise


@dataclass(frozen=True)
class Draws:
    """Rows to sample, R for each of B requests, and the parameters of the slots.

    slots        [B] int64, contiguous
    positions    [B, R] int64, positions of the tokens to be chosen; any strides
    temperature  [S] float32 by slot, any stride; 0 for greedy requests
    seed         [S] int64 by slot, any stride
    """

    slots: Tensor
    positions: Tensor
    temperature: Tensor
    seed: Tensor

    def arguments(self) -> tuple[Any, ...]:
        """Return tensors and strides in the argument order of kernels (`draw_of_row`)."""
        return (
            self.slots,
            self.positions,
            *self.positions.stride(),
            self.positions.shape[1],
            self.temperature,
            self.temperature.stride(0),
            self.seed,
            self.seed.stride(0),
        )

    def perturbed(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return logits / temperature + noise for token ids [n] or [B * R, n] int64: [B * R, n] float32; greedy rows
        unchanged."""
        rows = logits.float().view(*self.positions.shape, -1)
        ids = ids if ids.dim() == 1 else ids.view(rows.shape)
        temperature = self.temperature[self.slots].view(-1, 1, 1)
        seed = self.seed[self.slots].view(-1, 1, 1)
        random = temperature > 0
        noisy = rows / torch.where(random, temperature, 1.0) + gumbel_noise(seed, self.positions.unsqueeze(-1), ids)
        return torch.where(random, noisy, rows).view(logits.shape)


def gumbel_noise(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32: a hash of seed, position and token id (int64, broadcast).

    The hash is two rounds of the 64-bit finaliser of MurmurHash3; its upper 32 bits become a uniform in (0, 1).
    """
    x = _mix(seed + position * _GOLDEN)
    x = _mix(x + token * _GOLDEN)
    uniform = ((x >> 32 & 0xFFFFFFFF).double() + 0.5) / 4294967296.0
    # -log1p(-u) is exponential, and precise near zero, where the noise is large
    return -torch.log(-torch.log1p(-uniform)).float()


def _mix(x: Tensor) -> Tensor:
    x = (x ^ (x >> 33 & 0x7FFFFFFF)) * _MIX_1
    x = (x ^ (x >> 33 & 0x7FFFFFFF)) * _MIX_2
    return x ^ (x >> 33 & 0x7FFFFFFF)


def _check(logits: Tensor, draws: Draws, first: int, limits: Limits | None = None) -> None:
    check_slots(draws.slots)
    assert logits.dim() == 2 and logits.stride(1) == 1 and logits.is_floating_point()
    for tensor in () if limits is None else (limits.peaks, limits.gaps):
        assert tensor.shape == logits.shape[:1] and tensor.is_contiguous()


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


def _check_logprobs(logits: Tensor, k: int) -> None:
    assert logits.dim() == 2 and logits.stride(1) == 1 and logits.is_floating_point() and k <= logits.shape[1]


@operation(
    Implementation("triton", "aerie.kernels.sampling.choose_triton:norms_and_top", on_gpu), contract=_check_logprobs
)
def norms_and_top(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logsumexp, the k largest logits in descending order, and their columns.

    logits  [rows, size], any floating dtype, last stride 1, size >= k
    ->      [rows] float32; [rows, k] float32; [rows, k] int64
    """
    logits = logits.float()
    return torch.logsumexp(logits, -1), *logits.topk(k, dim=-1)
