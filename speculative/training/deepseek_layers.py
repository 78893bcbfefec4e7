"""DeepSeek-V3's decoder layer over whole sequences, with gradients (latent attention, experts after a router), and its
module for multi-token prediction (MTP).

The engine serves the same weights from the same descriptions with `workers.models.deepseek` and
`speculative.drafts.mtp.MtpModel`; `tests/speculative/training/test_training_mtp.py` compares them. Parameter
names are the published ones, except for experts, which are stacked (`layer_tensors` splits them).

Papers: arXiv 2405.04434, sections 2.1 and 2.2; arXiv 2412.19437, sections 2.1 and 2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from attention.rotation import rotate_pairs
from speculative.drafts.mtp_deepseek import DeepseekMtp
from speculative.training.eagle3 import BranchCache, GatedMLP, RMSNorm, branch_attention, linear
from speculative.training.experts import Experts, Router, named_experts
from speculative.training.mtp_head import DecoderLayer, MtpHead
from workers.layers.latent_attention import LATENT_EPS
from workers.models.deepseek import DeepseekConfig


class LatentAttention(nn.Module):
    """Multi-head latent attention with keys and values expanded."""

    def __init__(self, model: DeepseekConfig) -> None:
        super().__init__()
        self.model = model
        hidden, key = model.hidden_size, model.key_dim + model.rotated_dim
        if model.q_rank is None:
            self.q_proj = linear(hidden, model.num_heads * key)
        else:
            self.q_a_proj = linear(hidden, model.q_rank)
            self.q_a_layernorm = RMSNorm(model.q_rank, eps=LATENT_EPS)
            self.q_b_proj = linear(model.q_rank, model.num_heads * key)
        self.kv_a_proj_with_mqa = linear(hidden, model.latent + model.rotated_dim)
        self.kv_a_layernorm = RMSNorm(model.latent, eps=LATENT_EPS)
        self.kv_b_proj = linear(model.latent, model.num_heads * (model.key_dim + model.value_dim))
        self.o_proj = linear(model.num_heads * model.value_dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: BranchCache) -> Tensor:
        """Return [B, T, H] for x [B, T, H]; append this step to the cache. cos, sin: [T, rotated / 2].

        The first step is causal; a row of a later step attends to the first step up to itself and to its own branch.
        """
        query, key, value = (part.transpose(1, 2) for part in self._heads(x, cos, sin))
        cache.keys.append(key)
        cache.values.append(value)
        scale = self.model.attention_scale
        if len(cache.keys) == 1:
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        else:
            attended = branch_attention(query[:, :, None] * scale, cache)[:, :, 0]
        mixed: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [B, T, heads, key + rotated], and values [B, T, heads, value]."""
        model = self.model
        q = self.q_proj(x) if model.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(2, (model.num_heads, -1))
        latent, rotated = self.kv_a_proj_with_mqa(x).split((model.latent, model.rotated_dim), dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(2, (model.num_heads, -1))
        key, value = expanded.split((model.key_dim, model.value_dim), dim=-1)
        shared = rotate_pairs(rotated.unsqueeze(2), cos, sin).expand(-1, -1, model.num_heads, -1)
        query = torch.cat((q[..., : model.key_dim], rotate_pairs(q[..., model.key_dim :], cos, sin)), dim=-1)
        return query, torch.cat((key, shared), dim=-1), value


class MixtureOfExperts(nn.Module):
    """The chosen experts of each row, and the shared ones."""

    def __init__(self, model: DeepseekConfig) -> None:
        super().__init__()
        self.gate = Router(model.hidden_size, model.routing)
        self.experts = Experts(model.hidden_size, model.expert_width, model.routing.num_experts)
        self.shared_experts = GatedMLP(model.hidden_size, model.shared_width) if model.shared_width else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        flat = x.flatten(0, 1)
        chosen, weight = self.gate(flat)
        out: Tensor = self.experts(flat, chosen, weight).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)


def decoder_layer(model: DeepseekConfig, layer: int) -> DecoderLayer:
    """Return layer number `layer` of a model."""
    has_experts = model.has_experts(layer)
    mlp = MixtureOfExperts(model) if has_experts else GatedMLP(model.hidden_size, model.intermediate_size)
    norms = (RMSNorm(model.hidden_size, eps=model.rms_eps) for _ in range(2))
    return DecoderLayer(LatentAttention(model), mlp, norms)


def mtp_head(method: DeepseekMtp) -> MtpHead:
    """Return the trainable module."""
    model = method.model
    assert isinstance(model, DeepseekConfig), "only its architecture is trained"
    return MtpHead(method, decoder_layer(model, 0), model, model.rms_eps)


def layer_tensors(layer: nn.Module, name: str) -> dict[str, Tensor]:
    """Return a layer's tensors by their published names; `name` is the layer's."""
    return named_experts({f"{name}.{path}": tensor for path, tensor in layer.state_dict().items()})


def module_tensors(head: MtpHead) -> dict[str, Tensor]:
    """Return the module's tensors by their published names."""
    assert isinstance(head.method, DeepseekMtp)
    name = f"model.layers.{head.method.layer}"
    own = {part: getattr(head, part).weight for part in ("enorm", "hnorm", "eh_proj")}
    own["shared_head.norm"] = head.norm.weight
    return {f"{name}.{part}.weight": weight for part, weight in own.items()} | layer_tensors(head.layer, name)
