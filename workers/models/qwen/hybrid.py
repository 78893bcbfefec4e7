"""Qwen's hybrids: three layers of the gated delta rule, then one of gated attention, each with an MLP or experts. The
families `qwen3_next` and `qwen3_5` differ in their tensor names."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from aerie.attention.kv_cache.layout import LayerGroup
from aerie.attention.recurrent.layout import StateGroup, StateLayout
from aerie.kernels.capability import Capability
from aerie.kernels.delta_rule.tables import KERNEL_DIMS, TAPS, DeltaHeads
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.attention import Attention
from aerie.workers.layers.decoder_layer import AttentionLayer, DecoderLayer
from aerie.workers.layers.gated_delta_net import GatedDeltaNet, heads_of_rank
from aerie.workers.layers.norm import ZeroCentredRMSNorm
from aerie.workers.models import llama
from aerie.workers.models.config import rotated_dim_of
from aerie.workers.models.config_fields import size_of
from aerie.workers.models.llama import LlamaForCausalLM
from aerie.workers.models.moe import LlamaMoeConfig, make_feed_forward, stacked_experts
from aerie.workers.models.name_map import Packed
from aerie.workers.models.qwen.qwen3_moe import read_experts, shared_layer_rules
from aerie.workers.quantization.quant_method import Unquantized

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class HybridConfig(LlamaMoeConfig):
    """See `LlamaMoeConfig`.

    heads: heads of recurrent layers.
    recurrent: layers of the gated delta rule; the others have attention.
    """

    heads: DeltaHeads
    recurrent: frozenset[int]

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if layer not in self.recurrent)

    @property
    def cut_sizes(self) -> dict[str, int]:
        return super().cut_sizes | {"linear_num_key_heads": self.heads.key_heads}

    def check_device(self, device: Capability, dtype: torch.dtype, source: str) -> None:
        super().check_device(device, dtype, source)
        dims = {"linear_key_head_dim": self.heads.key_dim, "linear_value_head_dim": self.heads.value_dim}
        for name, dim in dims.items() if device.captures_graphs else ():
            if dim not in KERNEL_DIMS:
                known = ", ".join(map(str, KERNEL_DIMS))
                raise ValueError(f"{source}: {name}={dim}: on a GPU it is one of {known}; serve the model on a CPU")

    def kv_groups(self, tensor_parallel: int, dtype: torch.dtype) -> tuple[LayerGroup, ...]:
        (group,) = super().kv_groups(tensor_parallel, dtype)
        return (replace(group, layers=self.attention_layers),)

    def state_groups(self, tensor_parallel: int, dtype: torch.dtype) -> tuple[StateGroup, ...]:
        layout = StateLayout(heads_of_rank(self.heads, tensor_parallel), dtype)
        return (StateGroup(tuple(sorted(self.recurrent)), layout),) if self.recurrent else ()

    def linear_inputs(self, tensor_parallel: int) -> dict[str, int]:
        values = self.heads.value_heads * self.heads.value_dim
        own = {"linear_num_value_heads * linear_value_head_dim": values // tensor_parallel}
        return super().linear_inputs(tensor_parallel) | own


def read_config(config: dict[str, Any], source: str) -> HybridConfig:
    """Read the configuration of a Qwen3-Next, or of a Qwen3.5's text part. Raises ValueError for unsupported
    settings."""
    has_experts = any(config.get(key) is not None for key in ("num_experts", "num_experts_per_tok"))
    if has_experts:  # a model without MLPs may have no intermediate_size
        config = {"intermediate_size": config.get("moe_intermediate_size"), **config}
        size_of(config, "shared_expert_intermediate_size", source)
    dense = llama.read_config(config, source)
    _refuse_unsupported(config, source)
    return HybridConfig(
        **vars(dense) | {"rotated_dim": rotated_dim_of(config, dense.head_dim, source, 0.25), "qk_norm": True},
        heads=_heads(config, source),
        recurrent=_recurrent(config, dense.num_layers, source),
        experts=read_experts(config, source, normalise=True) if has_experts else None,
    )


def _refuse_unsupported(config: dict[str, Any], source: str) -> None:
    """Raise ValueError for values of the configuration that the model does not implement."""
    for key, only in (
        ("attn_output_gate", True),
        ("linear_conv_kernel_dim", TAPS),
        ("mamba_ssm_dtype", "float32"),
        ("output_gate_type", "swish"),
    ):
        value = config.get(key)
        if value not in (None, only) and (key, value) != ("output_gate_type", "silu"):
            raise ValueError(f"{source}: config.json: {key}={value!r} is not supported; only {only!r} is")


def _heads(config: dict[str, Any], source: str) -> DeltaHeads:
    """Read the sizes of the gated-delta-net layers."""
    sizes = {key: size_of(config, key, source) for key in ("linear_num_key_heads", "linear_num_value_heads")}
    key_heads, value_heads = sizes.values()
    if value_heads % key_heads:
        raise ValueError(
            f"{source}: linear_num_value_heads={value_heads} is no multiple of linear_num_key_heads={key_heads}; "
            "correct it, or download the checkpoint again"
        )
    dims = (size_of(config, key, source) for key in ("linear_key_head_dim", "linear_value_head_dim"))
    return DeltaHeads(key_heads, value_heads, *dims)


def _recurrent(config: dict[str, Any], num_layers: int, source: str) -> frozenset[int]:
    """Return the indices of the gated-delta-net layers; the others have full attention."""
    interval = size_of(config, "full_attention_interval", source, 4)
    kinds = config.get("layer_types") or [FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {FULL, LINEAR}.issuperset(kinds):
        raise ValueError(
            f"{source}: config.json: layer_types: must be {num_layers} (num_hidden_layers) times {FULL!r} or {LINEAR!r}"
        )
    if FULL not in kinds:
        raise ValueError(f"{source}: config.json: layer_types has no {FULL!r}; models without attention are not served")
    return frozenset(i for i, kind in enumerate(kinds) if kind == LINEAR)


def make_attention(config: HybridConfig, layer: int, group: TPGroup) -> Attention:
    """Return a layer's attention. layer: index in the KV pool."""
    return llama.make_attention(config, layer, group, config.hidden_size, ZeroCentredRMSNorm, gated=True)


def make_layer(config: HybridConfig, layer: int, group: TPGroup) -> DecoderLayer:
    attention: AttentionLayer
    if layer in config.recurrent:
        merged = isinstance(config.quant, Unquantized)
        attention = GatedDeltaNet(layer, group, config.hidden_size, config.heads, config.rms_eps, merged)
    else:
        attention = make_attention(config, layer, group)
    mlp = make_feed_forward(config, layer, group)
    return DecoderLayer(config.hidden_size, config.rms_eps, attention, mlp, group, ZeroCentredRMSNorm)


class HybridForCausalLM(LlamaForCausalLM):
    make_layer = staticmethod(make_layer)
    norm_type = ZeroCentredRMSNorm


def layer_rules(path: str, name: str) -> dict[str, str]:
    """Return the rules of a `NameMap` for one layer of either kind (`llama.layer_rules`)."""
    recurrent = {
        f"{path}.self_attn.in_proj": f"{name}.linear_attn.{{part}}",
        f"{path}.self_attn.gates": f"{name}.linear_attn.{{part}}",
        f"{path}.self_attn.core": f"{name}.{{part}}",
        f"{path}.self_attn.out_proj": f"{name}.linear_attn.out_proj",
    }
    return recurrent | shared_layer_rules(path, name)


def packed_experts(config: HybridConfig, name: str) -> tuple[Packed, ...]:
    """Return the rules of a `NameMap` for a layer's experts, which bf16 checkpoints stack. name: see
    `layer_rules`."""
    if config.experts is None:
        return ()
    return stacked_experts(f"{name}.mlp.experts", config.experts.routing.num_experts)
