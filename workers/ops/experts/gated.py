"""The gated activation inside an expert."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GatedActivation:
    """gate * sigmoid(alpha * gate) * (up + shift); before that gate and up are clamped from above to `limit`, up from
    below to -limit.

    The default is SwiGLU: silu(gate) * up.
    """

    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.shift)


SWIGLU = GatedActivation()
GPT_OSS = GatedActivation(alpha=1.702, limit=7.0, shift=1.0)  # openai/gpt-oss, torch/model.py, swiglu
