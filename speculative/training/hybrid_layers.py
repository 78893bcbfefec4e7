"""Qwen3.5's layer of gated attention over whole sequences, with gradients, and its module for multi-token prediction.
Parameter names are the published ones. `speculative.drafts.mtp_qwen` serves the same weights;
`tests/speculative/training/test_training_hybrid.py` compares them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from attention.rotation import rotate
from speculative.drafts.mtp_qwen import QwenMtp
from speculative.training.eagle3 import BranchCache, GatedMLP, branch_attention, linear
from speculative.training.experts import Experts, Router, named_experts
from speculative.training.mtp_head import DecoderLayer, MtpHead
from workers.models.qwen.hybrid import HybridConfig

_OWN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}


class ZeroCentredRMSNorm(nn.Module):
    """RMSNorm that multiplies by 1 + weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., size] -> [.., size]."""
        return functional.rms_norm(hidden, self.weight.shape, (1 + self.weight).to(hidden.dtype), self.eps)


class GatedAttention(nn.Module):
    """Grouped-query attention whose output is multiplied by the sigmoid of a gate; `q_proj` computes both q and the
    gate."""

    def __init__(self, model: HybridConfig) -> None:
        super().__init__()
        self.model = model
        size = model.hidden_size
        self.q_proj = linear(size, 2 * model.num_heads * model.head_dim)
        self.k_proj = linear(size, model.num_kv_heads * model.head_dim)
        self.v_proj = linear(size, model.num_kv_heads * model.head_dim)
        self.o_proj = linear(model.num_heads * model.head_dim, size)
        self.q_norm = ZeroCentredRMSNorm(model.head_dim, model.rms_eps)
        self.k_norm = ZeroCentredRMSNorm(model.head_dim, model.rms_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: BranchCache) -> Tensor:
        """Return [B, T, H] for x [B, T, H]; append this step to the cache. cos, sin: [T, rotated / 2]."""
        model = self.model
        batch, length, _ = x.shape
        query, gate = self.q_proj(x).view(batch, length, model.num_heads, 2, model.head_dim).unbind(3)
        key = self.k_proj(x).view(batch, length, model.num_kv_heads, model.head_dim)
        value = self.v_proj(x).view(batch, length, model.num_kv_heads, model.head_dim)
        cache.keys.append(rotate(self.k_norm(key), cos, sin).transpose(1, 2))
        cache.values.append(value.transpose(1, 2))
        query = rotate(self.q_norm(query), cos, sin).transpose(1, 2)
        grouped = query.reshape(batch, model.num_kv_heads, -1, length, model.head_dim) * model.head_dim**-0.5
        attended = branch_attention(grouped, cache).flatten(1, 2).transpose(1, 2)
        mixed: Tensor = self.o_proj((attended * gate.sigmoid()).flatten(2))
        return mixed


class GatedExperts(nn.Module):
    """The chosen experts of each row, and a shared one whose output is multiplied by the sigmoid of a gate."""

    def __init__(self, model: HybridConfig) -> None:
        super().__init__()
        assert model.experts is not None
        size, experts = model.hidden_size, model.experts
        self.gate = Router(size, experts.routing)
        self.experts = Experts(size, experts.width, experts.routing.num_experts)
        self.shared_expert = GatedMLP(size, experts.shared_width)
        self.shared_expert_gate = linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        flat = x.flatten(0, 1)
        chosen, weight = self.gate(flat)
        out: Tensor = self.experts(flat, chosen, weight).view_as(x)
        shared: Tensor = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return out + shared


def mtp_head(method: QwenMtp) -> MtpHead:
    """Return a newly initialised trainable module."""
    model = method.model
    dense = model.experts is None
    mlp = GatedMLP(model.hidden_size, model.intermediate_size) if dense else GatedExperts(model)
    norms = (ZeroCentredRMSNorm(model.hidden_size, model.rms_eps) for _ in range(2))
    layer = DecoderLayer(GatedAttention(model), mlp, norms)
    return MtpHead(method, layer, model, model.rms_eps, ZeroCentredRMSNorm)


def module_tensors(head: MtpHead) -> dict[str, Tensor]:
    """Return the module's tensors by their published names."""
    tensors = {}
    for name, tensor in head.state_dict().items():
        first, _, rest = name.partition(".")
        tensors[f"mtp.layers.0.{rest}" if first == "layer" else f"mtp.{_OWN[first]}.{rest}"] = tensor
    return named_experts(tensors)
