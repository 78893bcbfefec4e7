"""Layers of EAGLE and EAGLE-3 models: a decoder layer without a norm before its attention."""

import torch
from torch import Tensor, nn

from aerie.kernels.rope.rotation import Angles
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.forward_context import ForwardContext
from aerie.workers.layers.norm import RMSNorm
from aerie.workers.models.llama import LlamaConfig, make_attention, make_mlp

IGNORED_WEIGHTS = ("t2d", "*rotary_emb*")


def layer_names(layer: str) -> dict[str, str]:
    """Return `NameMap` rules for the layers named `layer`, which may have a hole."""
    return {
        f"{layer}.self_attn.qkv": f"{layer}.self_attn.{{part}}",
        f"{layer}.mlp.gate_up": f"{layer}.mlp.{{part}}",
        f"{layer}.{{block}}.{{module}}": f"{layer}.{{block}}.{{module}}",
        f"{layer}.{{norm}}": f"{layer}.{{norm}}",
    }


def same_names(*modules: str) -> dict[str, str]:
    """Return `NameMap` rules for modules named as in the checkpoint: embedding, vocabulary head, projection, final
    norm, and these."""
    return {name: name for name in ("embed_tokens", "lm_head", "fc", "norm", *modules)}


def joined_input(embedding: Tensor, feature: Tensor) -> Tensor:
    """Concatenate the normalised embedding of the next token and the normalised feature, [.., hidden] each. Also used
    in training."""
    return torch.cat((embedding, feature), dim=-1)


def projected(features: Tensor, input_norm: nn.Module | None, fc_norm: nn.ModuleList, fc: nn.Module) -> Tensor:
    """Project concatenated captured layers, [.., F], to [.., hidden], with EAGLE-3's optional norms. Also used in
    training."""
    if input_norm is not None:
        features = input_norm(features)
    if fc_norm:
        parts = features.chunk(len(fc_norm), dim=-1)
        features = torch.cat([norm(part) for norm, part in zip(fc_norm, parts, strict=True)], dim=-1)
    out: Tensor = fc(features)
    return out


class DraftLayer(nn.Module):
    """A Llama block without a norm before its attention. input_size: width of the attention's input."""

    def __init__(self, model: LlamaConfig, group: TPGroup, input_size: int) -> None:
        super().__init__()
        self.group = group
        self.self_attn = make_attention(model, 0, group, input_size)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_eps)
        self.mlp = make_mlp(model, group)

    def forward(self, x: Tensor, residual: Tensor, angles: Angles, context: ForwardContext) -> Tensor:
        """Return the residual stream after attention and MLP, [n, hidden] for the rows that attend. On a GPU `residual`
        changes in place.

        x: [rows, input_size].
        residual: [rows, hidden].
        """
        attended = self.self_attn.partial(x, angles, context)
        residual = context.attending_rows(residual).contiguous()
        normed, residual = self.post_attention_layernorm.add(attended, residual, self.group)
        out: Tensor = residual + self.mlp(normed)
        return out
