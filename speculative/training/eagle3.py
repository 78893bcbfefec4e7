"""The EAGLE-3 head over whole sequences, unrolled on its own outputs, and the layers that MTP modules share.

The engine serves the head from the same description (`speculative.drafts.eagle3.Eagle3`) and the same files with
`speculative.drafts.eagle3.Eagle3Model`, which has no gradients and reads KV from pages;
`tests/speculative/training/test_training_serving.py` compares the two. Parameter names are those of the published
heads. Paper: EAGLE-3, arXiv 2503.01840, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attention.rotation import rotate
from speculative.drafts.eagle3 import Eagle3
from speculative.drafts.layers import joined_input, projected
from speculative.training.draft import TrainedDraft
from workers.layers.rotary import frequencies
from workers.models.llama import LlamaConfig


@dataclass
class BranchCache:
    """Keys and values [B, kv_heads, T, head_dim] of step 0 (the prefix) and of each later step (the branches)."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def branch_attention(query: Tensor, cache: BranchCache) -> Tensor:
    """Return the attention of row n to rows 0..n of the cache's first step and to row n of every later step.

    query: [B, kv_heads, group, T, head_dim], already scaled. Returns the same shape. Scores take B * heads * T * T
    elements, once also in float32.
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


def shift_left(rows: Tensor, count: int) -> Tensor:
    """Return [B, T, H] whose row n is row n + count; zeros at the end."""
    return functional.pad(rows[:, count:], (0, 0, 0, min(count, rows.shape[1])))


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer without bias."""
    return nn.Linear(inputs, outputs, bias=False)


class RMSNorm(nn.RMSNorm):
    """torch's, with the weight cast to the input's dtype: under autocast, a float32 weight prevents the fused
    kernel."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., H] -> [.., H]."""
        return functional.rms_norm(hidden, self.normalized_shape, self.weight.to(hidden.dtype), self.eps)


class GatedMLP(nn.Module):
    """silu(gate) * up, down."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, width)
        self.up_proj = linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[.., H] -> [.., H]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftAttention(nn.Module):
    """Grouped-query attention whose queries, keys and values read [.., 2 * hidden]."""

    def __init__(self, model: LlamaConfig) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim = model.num_kv_heads, model.head_dim
        wide = 2 * model.hidden_size
        self.q_proj = linear(wide, model.num_heads * model.head_dim)
        self.k_proj = linear(wide, model.num_kv_heads * model.head_dim)
        self.v_proj = linear(wide, model.num_kv_heads * model.head_dim)
        self.o_proj = linear(model.num_heads * model.head_dim, model.hidden_size)

    def forward(self, joined: Tensor, cos: Tensor, sin: Tensor, cache: BranchCache) -> Tensor:
        """Return [B, T, H] for joined [B, T, 2H]; append this step to the cache. cos, sin: [T, head_dim / 2]."""
        batch, length, _ = joined.shape
        query, key, value = (
            project(joined).view(batch, length, -1, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        cache.keys.append(rotate(key, cos, sin).transpose(1, 2))
        cache.values.append(value.transpose(1, 2))
        grouped = rotate(query, cos, sin).transpose(1, 2).reshape(batch, self.num_kv_heads, -1, length, self.head_dim)
        attended = branch_attention(grouped * self.head_dim**-0.5, cache)
        mixed: Tensor = self.o_proj(attended.flatten(1, 2).transpose(1, 2).flatten(2))
        return mixed


class DraftLayer(nn.Module):
    """The one decoder layer. It reads the concatenated embedding and feature; its residual stream is the feature.
    norm_before_residual: as in `speculative.drafts.eagle3_config.HeadFlags`."""

    def __init__(self, model: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = DraftAttention(model)
        self.mlp = GatedMLP(model.hidden_size, model.intermediate_size)
        self.input_layernorm = RMSNorm(model.hidden_size, eps=model.rms_eps)
        self.hidden_norm = RMSNorm(model.hidden_size, eps=model.rms_eps)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, eps=model.rms_eps)

    def forward(self, embedding: Tensor, feature: Tensor, cos: Tensor, sin: Tensor, cache: BranchCache) -> Tensor:
        """Return the residual stream after the layer, [B, T, H].

        embedding, feature: [B, T, H]. cos, sin: [T, head_dim / 2].
        """
        normed = self.hidden_norm(feature)
        joined = joined_input(self.input_layernorm(embedding), normed)
        residual = normed if self.norm_before_residual else feature
        hidden: Tensor = residual + self.self_attn(joined, cos, sin, cache)
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden


class Eagle3Head(TrainedDraft):
    """The trainable head. Its token embedding is the target's, whose results are arguments."""

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
        self.lm_head = linear(model.hidden_size, method.vocab_size)
        self.register_buffer("frequencies", frequencies(model.rope, model.head_dim), persistent=False)

    def features(self, output: Any) -> Tensor:
        return torch.cat([output.hidden_states[layer] for layer in self.method.capture], dim=-1)

    def unroll(self, embeddings: Tensor, captured: Tensor, num_steps: int) -> list[Tensor]:
        """Return the states before the final norm, or after it if the head has norm_output. captured: [B, T, 3H]."""
        hidden = self.project(captured)
        cache = BranchCache()
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
        """Project concatenated captured streams [.., 3H] to [.., H]."""
        return projected(captured, self.input_norm, self.fc_norm, self.fc)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden if self.method.flags.norm_output else self.norm(hidden))
        return logits
