"""The module for multi-token prediction over whole sequences, unrolled on its own outputs.

Trained beside its target (`deepseek`) and afterwards alone (`draft`). The engine serves it, from the same description
(`speculative.draft_models.mtp.Mtp`), by `speculative.draft_models.mtp.MtpModel`;
`tests/speculative/training/test_training_mtp.py` holds the two equal. Paper: arXiv 2412.19437, section 2.2. There
each depth has a module of its own; one that drafts all depths, as it is served, must know its own outputs as inputs,
hence the unrolling (training-time test of EAGLE-3, arXiv 2503.01840).

Rows and steps are those of `draft_model`: row n of step 0 joins the embedding of token n+1 with the target's final
hidden state of position n, stands at position n and predicts token n+2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from speculative.draft_models.mtp import Mtp
from speculative.training.deepseek_layers import DeepseekLayer, linear
from speculative.training.draft_model import BranchCache, RMSNorm, TrainedDraft, shift_left
from workers.layers.rotary import frequencies


class MtpHead(TrainedDraft):
    """The trainable module; embedding and vocabulary head are the target's."""

    frequencies: Tensor

    def __init__(self, method: Mtp) -> None:
        super().__init__()
        self.method = method
        model = method.model
        self.enorm, self.hnorm, self.norm = (RMSNorm(model.hidden_size, eps=model.rms_eps) for _ in range(3))
        self.eh_proj = linear(2 * model.hidden_size, model.hidden_size)
        self.layer = DeepseekLayer(model, 0)
        self.register_buffer("frequencies", frequencies(model.rope, model.rotated_dim), persistent=False)
        self._target_head: list[nn.Module] = []

    def use_head(self, lm_head: nn.Module) -> None:
        """Make the target's vocabulary head the one that `logits` asks; it is not trained with this module."""
        self._target_head = [lm_head]

    def features(self, output: Any) -> Tensor:
        final: Tensor = output.last_hidden_state
        return final

    def forward(self, embeddings: Tensor, captured: Tensor, num_steps: int, live: Tensor | None = None) -> list[Tensor]:
        """What leaves the last norm in every step, which is the recurrent state too: `num_steps` tensors [B, T, H].

        `embeddings` [B, T, H] holds the embedding of token n in row n, `captured` [B, T, H] the target's final hidden
        state of position n, `live` [B, T] bool the rows that are no padding. Rows n > T - s - 2 of step s read past the
        sequence and are meaningless.
        """
        positions = torch.arange(embeddings.shape[1], dtype=torch.float32, device=embeddings.device)[:, None]
        magnitude = self.method.model.rope.magnitude
        hidden, cache, steps = captured, BranchCache([], []), []
        for step in range(num_steps):
            angles = (positions + step) * self.frequencies
            cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
            joined = torch.cat((self.enorm(shift_left(embeddings, step + 1)), self.hnorm(hidden)), dim=-1)
            hidden = self.norm(self.layer(self.eh_proj(joined), cos, sin, cache, live))
            steps.append(hidden)
        return steps

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., H] recurrent states -> [.., vocabulary] logits, in the type of the target's head."""
        head = self._target_head[0]
        logits: Tensor = head(hidden.to(next(head.parameters()).dtype))
        return logits
