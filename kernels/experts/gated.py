"""The gated activation inside an expert."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GatedActivation:
    """gate * sigmoid(alpha * (gate + cubic * gate^3)) * (up + shift). The default is SwiGLU: silu(gate) * up.

    limit: first, gate is clamped to at most `limit` and up to -limit .. limit; None: no clamping.
    """

    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0
    cubic: float = 0.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        inner = gate if self.cubic == 0 else gate + self.cubic * gate * gate * gate
        return gate * torch.sigmoid(self.alpha * inner) * (up + self.shift)


SWIGLU = GatedActivation()
GPT_OSS = GatedActivation(alpha=1.702, limit=7.0, shift=1.0)  # openai/gpt-oss, torch/model.py, swiglu
# tanh approximation of GELU (arXiv 1606.08415, section 2): (1 + tanh x) / 2 = sigmoid(2 x)
GELU_TANH = GatedActivation(alpha=2 * math.sqrt(2 / math.pi), cubic=0.044715)
GATED = {"silu": SWIGLU, "gelu_pytorch_tanh": GELU_TANH}
"""Gated activations by their names in config.json, the same as in `aerie.kernels.norm.norm.ACTIVATIONS`."""
