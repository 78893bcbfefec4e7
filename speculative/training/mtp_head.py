"""A target's MTP module over whole sequences, with gradients, unrolled on its own outputs.

The engine serves the same weights with `speculative.drafts.mtp.MtpModel`. In the paper (arXiv 2412.19437, section 2.2),
each depth has a module of its own. Here one module drafts all depths, so it is trained on its own outputs
(training-time test of EAGLE-3, arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from speculative.drafts.mtp import Mtp
from speculative.training.draft import TrainedDraft
from speculative.training.eagle3 import BranchCache, RMSNorm, linear, shift_left
from workers.layers.rotary import RopeConfig, frequencies


class RotatedConfig(Protocol):
    """The configuration fields that RoPE angles depend on."""

    @property
    def rope(self) -> RopeConfig: ...

    @property
    def rotated_dim(self) -> int: ...


class DecoderLayer(nn.Module):
    """A decoder layer over whole sequences: attention and an MLP or experts, each after a norm.

    self_attn: called with (x [B, T, H], cos, sin, cache).
    """

    def __init__(self, self_attn: nn.Module, mlp: nn.Module, norms: Iterable[nn.Module]) -> None:
        super().__init__()
        self.self_attn, self.mlp = self_attn, mlp
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: BranchCache) -> Tensor:
        """Return the residual stream [B, T, H] after the layer."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, cache)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class MtpHead(TrainedDraft):
    """The trainable module; embedding and vocabulary head are the target's.

    norm: makes a norm of (size, eps).
    """

    frequencies: Tensor

    def __init__(
        self,
        method: Mtp,
        layer: DecoderLayer,
        rotated: RotatedConfig,
        rms_eps: float,
        norm: Callable[[int, float], nn.Module] = RMSNorm,
    ) -> None:
        super().__init__()
        self.method, self._rotated = method, rotated
        size = method.model.hidden_size
        self.enorm, self.hnorm, self.norm = (norm(size, rms_eps) for _ in range(3))
        self.eh_proj = linear(2 * size, size)
        self.layer = layer
        self.register_buffer("frequencies", frequencies(rotated.rope, rotated.rotated_dim), persistent=False)
        self._target_head: list[nn.Module] = []  # in a list, so that it is not a submodule and not trained

    def use_head(self, lm_head: nn.Module) -> None:
        """Make `logits` use the target's vocabulary head, which is not trained."""
        self._target_head = [lm_head]

    def features(self, output: Any) -> Tensor:
        final: Tensor = output.last_hidden_state
        return final

    def unroll(self, embeddings: Tensor, captured: Tensor, num_steps: int) -> list[Tensor]:
        """Return each step's output of the last norm, which is the recurrent state. captured: the target's final hidden
        state."""
        hidden, cache, steps = captured, BranchCache(), []
        for step in range(num_steps):
            cos, sin = rotation(self._rotated.rope, self.frequencies, embeddings.shape[1], step)
            joined = torch.cat((self.enorm(shift_left(embeddings, step + 1)), self.hnorm(hidden)), dim=-1)
            hidden = self.norm(self.layer(self.eh_proj(joined), cos, sin, cache))
            steps.append(hidden)
        return steps

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [.., vocabulary] logits of recurrent states [.., H], in the dtype of the target's head."""
        head = self._target_head[0]
        logits: Tensor = head(hidden.to(next(head.parameters()).dtype))
        return logits


def rotation(rope: RopeConfig, frequencies: Tensor, length: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [length, rotated / 2] of the positions from `first`."""
    positions = torch.arange(length, dtype=torch.float32, device=frequencies.device)[:, None] + first
    angles = positions * frequencies
    return angles.cos() * rope.magnitude, angles.sin() * rope.magnitude
