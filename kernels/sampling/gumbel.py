"""Gumbel noise as a hash of (seed, position, token id), so that a sampled token depends only on the preceding text."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, odd, as a signed integer
_MIX_1, _MIX_2 = -49064778989728563, -4265267296055464877


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
