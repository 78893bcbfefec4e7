"""The EAGLE-3 head over whole sequences, unrolled on its own outputs (training-time test).

Used by draft training and by its measurements. The engine serves the same head, from the same description
(`speculative.draft_models.eagle3.Eagle3`) and the same files, by `speculative.draft_models.eagle3.Eagle3Model`, which
has no gradients and reads KV from pages; `tests/speculative/training/test_training_serving.py` holds the two equal.
Parameter names are those of the published heads. Paper: EAGLE-3, arXiv 2503.01840, section 3.

Row n of step 0 joins the embedding of token n+1 with the target's feature of position n, stands at position n and
predicts token n+2. Step s continues the chain anchored at n: the embedding of token n+s+1, the head's own hidden
state of step s-1 instead of a feature, position n+s, predicting token n+s+2. It attends to the true prefix (step 0,
rows 0..n) and to its own branch (steps 1..s, row n), as drafting does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attention.rotation import rotate
from speculative.draft_models.eagle3 import Eagle3
from speculative.draft_models.layers import joined_input
from workers.layers.rotary import frequencies
from workers.models.llama import LlamaConfig


@dataclass
class BranchCache:
    """Keys and values [B, kv_heads, T, head_dim] of step 0 (the prefix) and of each later step (the branches)."""

    keys: list[Tensor]
    values: list[Tensor]


class RMSNorm(nn.RMSNorm):
    """torch's, with the weight in the input's dtype: under autocast a float32 weight would miss the fused kernel."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., H] -> [.., H]."""
        return nn.functional.rms_norm(hidden, self.normalized_shape, self.weight.to(hidden.dtype), self.eps)


class TrainedDraft(nn.Module, ABC):
    """What `draft` trains and measures: a draft over whole sequences."""

    @abstractmethod
    def features(self, output: Any) -> Tensor:
        """[B, T, F]: what it reads of transformers' output of the target, which has the streams before all layers."""

    @abstractmethod
    def forward(self, embeddings: Tensor, captured: Tensor, num_steps: int) -> list[Tensor]:
        """The recurrent state [B, T, H] of every step, of the target's embedding of each row's token [B, T, H] and its
        features [B, T, F]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[.., H] recurrent states -> [.., draft vocabulary]."""


class DraftAttention(nn.Module):
    """Grouped-query attention whose queries, keys and values read [.., 2 * hidden]."""

    def __init__(self, model: LlamaConfig) -> None:
        super().__init__()
        self.num_kv_heads = model.num_kv_heads
        self.head_dim = model.head_dim
        wide = 2 * model.hidden_size
        self.q_proj = nn.Linear(wide, model.num_heads * model.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, model.num_kv_heads * model.head_dim, bias=False)
        self.v_proj = nn.Linear(wide, model.num_kv_heads * model.head_dim, bias=False)
        self.o_proj = nn.Linear(model.num_heads * model.head_dim, model.hidden_size, bias=False)

    def forward(self, joined: Tensor, cos: Tensor, sin: Tensor, cache: BranchCache) -> Tensor:
        """`joined` [B, T, 2H], `cos` and `sin` [T, head_dim / 2] -> [B, T, H]; appends this step to the cache."""
        batch, length, _ = joined.shape

        def heads(flat: Tensor) -> Tensor:
            return flat.view(batch, length, -1, self.head_dim)

        query = rotate(heads(self.q_proj(joined)), cos, sin).transpose(1, 2)
        cache.keys.append(rotate(heads(self.k_proj(joined)), cos, sin).transpose(1, 2))
        cache.values.append(heads(self.v_proj(joined)).transpose(1, 2))
        grouped = query.reshape(batch, self.num_kv_heads, -1, length, self.head_dim)
        attended = branch_attention(grouped * self.head_dim**-0.5, cache)
        mixed: Tensor = self.o_proj(attended.reshape(batch, -1, length, self.head_dim).transpose(1, 2).flatten(2))
        return mixed


def branch_attention(query: Tensor, cache: BranchCache) -> Tensor:
    """Each row n attends to rows 0..n of the cache's first step and to row n of every later step.

    `query` [B, kv_heads, group, T, head_dim], already scaled; returns the same shape. Scores take
    B * heads * T * T elements, in float32 once.
    """
    length = query.shape[3]
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    prefix = query @ cache.keys[0][:, :, None].transpose(-1, -2)
    prefix = prefix.masked_fill(future, float("-inf"))
    own = [(query * key[:, :, None]).sum(-1, keepdim=True) for key in cache.keys[1:]]
    scores = torch.cat([prefix, *own], dim=-1)
    weights = torch.softmax(scores.float(), dim=-1).to(query.dtype)
    attended = weights[..., :length] @ cache.values[0][:, :, None]
    for step, value in enumerate(cache.values[1:]):
        attended = attended + weights[..., length + step, None] * value[:, :, None]
    return attended


class DraftMLP(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, model: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.up_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.down_proj = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., H] -> [.., H]."""
        output: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class DraftLayer(nn.Module):
    """The one decoder layer: it reads embedding and feature side by side, its residual stream is the feature.
    norm_before_residual: as in `speculative.draft_models.eagle3_config.HeadFlags`."""

    def __init__(self, model: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = DraftAttention(model)
        self.mlp = DraftMLP(model)
        self.input_layernorm = RMSNorm(model.hidden_size, eps=model.rms_eps)
        self.hidden_norm = RMSNorm(model.hidden_size, eps=model.rms_eps)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, eps=model.rms_eps)

    def forward(self, embedding: Tensor, feature: Tensor, cos: Tensor, sin: Tensor, cache: BranchCache) -> Tensor:
        """`embedding`, `feature` [B, T, H], `cos`, `sin` [T, head_dim / 2] -> the residual stream's sum after the
        layer, [B, T, H]."""
        normed = self.hidden_norm(feature)
        joined = joined_input(self.input_layernorm(embedding), normed)
        residual = normed if self.norm_before_residual else feature
        hidden: Tensor = residual + self.self_attn(joined, cos, sin, cache)
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden


class Eagle3Head(TrainedDraft):
    """The trainable head; the token embedding is the target's and is handed in."""

    frequencies: Tensor

    def __init__(self, method: Eagle3) -> None:
        super().__init__()
        self.method = method
        model, flags, width = method.model, method.flags, len(method.capture) * method.target_hidden_size
        self.fc = nn.Linear(width, model.hidden_size, bias=method.projection_bias)
        self.input_norm = RMSNorm(width, eps=model.rms_eps) if flags.norm_before_fc else None
        per_layer = method.capture if flags.fc_norm else ()
        self.fc_norm = nn.ModuleList([RMSNorm(method.target_hidden_size, eps=model.rms_eps) for _ in per_layer])
        self.midlayer = DraftLayer(model, flags.norm_before_residual)
        self.norm = RMSNorm(model.hidden_size, eps=model.rms_eps)
        self.lm_head = nn.Linear(model.hidden_size, method.vocab_size, bias=False)
        self.register_buffer("frequencies", frequencies(model.rope, model.head_dim), persistent=False)

    def features(self, output: Any) -> Tensor:
        return torch.cat([output.hidden_states[layer] for layer in self.method.capture], dim=-1)

    def forward(self, embeddings: Tensor, captured: Tensor, num_steps: int) -> list[Tensor]:
        """The recurrent hidden state of every step, before the final norm unless the head has norm_output: `num_steps`
        tensors [B, T, H].

        `embeddings` [B, T, H] holds the embedding of token n in row n, `captured` [B, T, 3H] the target's three
        captured streams of position n. Rows n > T - s - 2 of step s read past the sequence and are meaningless.
        """
        hidden = self.project(captured)
        cache = BranchCache([], [])
        positions = torch.arange(embeddings.shape[1], dtype=torch.float32, device=embeddings.device)[:, None]
        steps = []
        for step in range(num_steps):
            angles = (positions + step) * self.frequencies
            hidden = self.midlayer(shift_left(embeddings, step + 1), hidden, angles.cos(), angles.sin(), cache)
            if self.method.flags.norm_output:
                hidden = self.norm(hidden)
            steps.append(hidden)
        return steps

    def project(self, captured: Tensor) -> Tensor:
        """[.., 3H] captured streams, side by side -> [.., H]."""
        if self.input_norm is not None:
            captured = self.input_norm(captured)
        if self.fc_norm:
            parts = captured.chunk(len(self.fc_norm), dim=-1)
            captured = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        projected: Tensor = self.fc(captured)
        return projected

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., H] recurrent hidden states -> [.., draft_vocab] logits."""
        logits: Tensor = self.lm_head(hidden if self.method.flags.norm_output else self.norm(hidden))
        return logits


def shift_left(rows: Tensor, count: int) -> Tensor:
    """[B, T, H] with row n taken from row n + count, zeros where there is none."""
    return nn.functional.pad(rows[:, count:], (0, 0, 0, min(count, rows.shape[1])))
