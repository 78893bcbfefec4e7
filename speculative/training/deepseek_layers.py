"""DeepSeek-V3's decoder layer over whole sequences, with gradients: latent attention, and experts after a router.

Used for the target's layers and for the module that drafts (`mtp_model`). The engine serves the same weights by
`workers.models.deepseek`, from the same description. Parameter names are the published ones, but for experts, which
are stacked; `deepseek_files` gives them their names. Papers: arXiv 2405.04434 (sections 2.1, 2.2) and 2412.19437
(section 2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from attention.rotation import rotate_pairs
from speculative.training.draft_model import BranchCache, RMSNorm, branch_attention
from workers.layers.latent_attention import LATENT_EPS
from workers.layers.routing import Routing, route
from workers.models.deepseek import DeepseekConfig

# Up to so many experts every row goes through all of them: a few wide products, which wait for nothing and can be
# captured, instead of sorting rows.
MAX_DENSE_EXPERTS = 64


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Without bias, as all of DeepSeek's."""
    return nn.Linear(inputs, outputs, bias=False)


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
        """`x` [B, T, H], `cos` and `sin` [T, rotated / 2] -> [B, T, H]; appends this step to the cache. The first step
        is causal, rows of later ones see that and their own branch."""
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
        """Queries and keys [B, T, heads, key + rotated], values [B, T, heads, value]."""
        model = self.model
        q = self.q_proj(x) if model.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(2, (model.num_heads, -1))
        latent, turned = self.kv_a_proj_with_mqa(x).split((model.latent, model.rotated_dim), dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(2, (model.num_heads, -1))
        key, value = expanded.split((model.key_dim, model.value_dim), dim=-1)
        shared = rotate_pairs(turned.unsqueeze(2), cos, sin).expand(-1, -1, model.num_heads, -1)
        query = torch.cat((q[..., : model.key_dim], rotate_pairs(q[..., model.key_dim :], cos, sin)), dim=-1)
        return query, torch.cat((key, shared), dim=-1), value


class GatedMLP(nn.Module):
    """silu(gate) * up, down."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(hidden, width),
            linear(hidden, width),
            linear(width, hidden),
        )

    def forward(self, x: Tensor, live: Tensor | None = None) -> Tensor:
        """[.., H] -> [.., H]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Router(nn.Module):
    """Chooses experts in float32, and counts whom rows chose while it is trained.

    counts: [experts] float32, of live rows since `balance` was last called.
    """

    e_score_correction_bias: Tensor
    counts: Tensor

    def __init__(self, hidden: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.num_experts, hidden))
        if routing.has_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(routing.num_experts))
        self.register_buffer("counts", torch.zeros(routing.num_experts), persistent=False)

    def forward(self, x: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of rows [N, H], experts [N, k] int64 and their weights float32. live: [N] bool, rows that are no padding."""
        bias = self.e_score_correction_bias if self.routing.has_bias else None
        with torch.autocast(x.device.type, enabled=False):
            chosen, weight = route(functional.linear(x.float(), self.weight.float()), bias, self.routing)
        if self.training:
            ones = torch.ones_like(weight) if live is None else live.to(weight.dtype)[:, None].expand_as(weight)
            self.counts.index_add_(0, chosen.flatten(), ones.detach().flatten())
        return chosen, weight

    @torch.no_grad()
    def balance(self, speed: float) -> None:
        """Makes experts that had more than their share less attractive and the others more, by a fixed step
        (arXiv 2412.19437, section 2.1.2)."""
        if self.routing.has_bias:
            self.e_score_correction_bias += speed * torch.sign(self.counts.mean() - self.counts)
        self.counts.zero_()


class Experts(nn.Module):
    """gate_up: [experts, 2 width, H], gates over what they gate. down: [experts, H, width]."""

    def __init__(self, hidden: int, width: int, num_experts: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))

    def forward(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        """`x` [N, H], `chosen` and `weight` [N, k] -> [N, H]."""
        return (self._all if len(self.down) <= MAX_DENSE_EXPERTS else self._chosen)(x, chosen, weight)

    def _all(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        """All experts side by side are one gated MLP, in which those that were not chosen count for nothing."""
        share = torch.zeros(len(x), len(self.down), dtype=weight.dtype, device=x.device).scatter(1, chosen, weight)
        both = functional.linear(x, self.gate_up.flatten(0, 1))
        gate, up = both.view(len(x), len(self.down), 2, -1).unbind(2)
        inner = functional.silu(gate) * up * share.to(up.dtype)[..., None]
        return functional.linear(inner.flatten(1), self.down.transpose(0, 1).flatten(1))

    def _chosen(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        """Expert by expert, which waits for the device: nothing that could be captured."""
        out = x.new_zeros(x.shape)
        for expert in range(len(self.down)):
            row, place = torch.where(chosen == expert)
            gate, up = functional.linear(x[row], self.gate_up[expert]).chunk(2, dim=-1)
            part = functional.linear(functional.silu(gate) * up, self.down[expert])
            out = out.index_add(0, row, (part * weight[row, place, None]).to(out.dtype))
        return out


class MixtureOfExperts(nn.Module):
    """Each row through the experts that are chosen, and through the shared ones."""

    def __init__(self, model: DeepseekConfig) -> None:
        super().__init__()
        self.gate = Router(model.hidden_size, model.routing)
        self.experts = Experts(model.hidden_size, model.expert_width, model.routing.num_experts)
        self.shared_experts = GatedMLP(model.hidden_size, model.shared_width) if model.shared_width else None

    def forward(self, x: Tensor, live: Tensor | None = None) -> Tensor:
        """[B, T, H] -> [B, T, H]. live: [B, T] bool."""
        flat = x.flatten(0, 1)
        chosen, weight = self.gate(flat, None if live is None else live.flatten())
        out: Tensor = self.experts(flat, chosen, weight).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)


class DeepseekLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, model: DeepseekConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = LatentAttention(model)
        has_experts = model.has_experts(layer)
        self.mlp = MixtureOfExperts(model) if has_experts else GatedMLP(model.hidden_size, model.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(model.hidden_size, eps=model.rms_eps) for _ in range(2)
        )

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: BranchCache, live: Tensor | None = None
    ) -> Tensor:
        """The residual stream after the layer [B, T, H], of that before it."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, cache)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden), live)
        return out


def initialise(module: nn.Module) -> None:
    """Matrices are drawn with a deviation of 0.02, norms are ones; draws from the global RNG."""
    for name, parameter in module.named_parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.02)
        else:
            assert "norm" in name, f"{name} is no norm"
            nn.init.ones_(parameter)


def routers(module: nn.Module) -> list[Router]:
    """All of them."""
    return [part for part in module.modules() if isinstance(part, Router)]
