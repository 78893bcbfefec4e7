"""Qwen's hybrids: three layers of the gated delta rule, then one of gated attention, each with an MLP or experts. The
families `qwen3_next` and `qwen3_5` differ in their tensor names."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from attention.capability import Capability
from attention.kv_cache.layout import LayerGroup
from attention.ops.delta_rule.tables import KERNEL_DIMS, TAPS, DeltaHeads
from attention.recurrent.layout import StateGroup, StateLayout
from workers.distributed.tp_group import TPGroup
from workers.layers.attention import Attention
from workers.layers.decoder_layer import AttentionLayer, DecoderLayer, FeedForward
from workers.layers.gated_delta_net import GatedDeltaNet, heads_of_rank
from workers.layers.moe import MixtureOfExperts
from workers.layers.norm import ZeroCentredRMSNorm
from workers.models import llama
from workers.models.config import rotated_dim_of
from workers.models.config_fields import flag_of, ids_of, size_of
from workers.models.llama import LlamaConfig, LlamaForCausalLM, make_mlp
from workers.models.moe import check_experts_device, expert_cuts, expert_inputs, num_experts_of
from workers.ops.experts.route import Routing
from workers.quantization.quant_method import Unquantized

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts of a hybrid.

    routing: routing of routed experts.
    width, shared_width: intermediate sizes of an expert and of the shared expert.
    layers: layers with experts; the others have MLPs of intermediate_size.
    """

    routing: Routing
    width: int
    shared_width: int
    layers: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class HybridConfig(LlamaConfig):
    """See `LlamaConfig`.

    heads: heads of recurrent layers.
    recurrent: layers of the gated delta rule; the others have attention.
    experts: None for a dense model.
    """

    heads: DeltaHeads
    recurrent: frozenset[int]
    experts: Experts | None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if layer not in self.recurrent)

    @property
    def cut_sizes(self) -> dict[str, int]:
        sizes = super().cut_sizes if self._has_mlps else {}
        if self.experts is not None:
            cuts = expert_cuts(self.experts.routing, self.experts.width, 0, self.whole_experts)
            sizes = sizes | cuts | {"shared_expert_intermediate_size": self.experts.shared_width}
        return sizes | {"linear_num_key_heads": self.heads.key_heads}

    @property
    def _has_mlps(self) -> bool:
        return self.experts is None or len(self.experts.layers) < self.num_layers

    def with_whole_experts(self, source: str) -> Self:
        return super().with_whole_experts(source) if self.experts is None else replace(self, whole_experts=True)

    def check_device(self, device: Capability, dtype: torch.dtype, source: str) -> None:
        if self.experts is not None:
            check_experts_device(device, dtype, source)
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
        inputs = super().linear_inputs(tensor_parallel)
        if not self._has_mlps:
            del inputs["intermediate_size"]
        if self.experts is not None:
            inputs |= expert_inputs(self.experts.width, 0, self.whole_experts, tensor_parallel)
            inputs |= {"shared_expert_intermediate_size": self.experts.shared_width // tensor_parallel}
        values = self.heads.value_heads * self.heads.value_dim
        return inputs | {"linear_num_value_heads * linear_value_head_dim": values // tensor_parallel}


def read_config(config: dict[str, Any], source: str) -> HybridConfig:
    """Read the configuration of a Qwen3-Next, or of a Qwen3.5's text part. Raises ValueError for unsupported
    settings."""
    has_experts = any(config.get(key) is not None for key in ("num_experts", "num_experts_per_tok"))
    if has_experts:  # a model without MLPs may have no intermediate_size
        config = {"intermediate_size": config.get("moe_intermediate_size"), **config}
    dense = llama.read_config(config, source)
    _refuse_unsupported(config, source)
    return HybridConfig(
        **vars(dense) | {"rotated_dim": rotated_dim_of(config, dense.head_dim, source, 0.25), "qk_norm": True},
        heads=_heads(config, source),
        recurrent=_recurrent(config, dense.num_layers, source),
        experts=_experts(config, dense.num_layers, source) if has_experts else None,
    )


def _refuse_unsupported(config: dict[str, Any], source: str) -> None:
    for key, only in (
        ("attn_output_gate", True),
        ("linear_conv_kernel_dim", TAPS),
        ("mamba_ssm_dtype", "float32"),
        ("output_gate_type", "swish"),
    ):
        given = config.get(key)
        if given not in (None, only) and (key, given) != ("output_gate_type", "silu"):
            raise ValueError(f"{source}: config.json: {key}={given!r} is not supported; only {only!r} is")


def _heads(config: dict[str, Any], source: str) -> DeltaHeads:
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
    interval = size_of(config, "full_attention_interval", source, 4)
    kinds = config.get("layer_types") or [FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {FULL, LINEAR}.issuperset(kinds):
        raise ValueError(
            f"{source}: config.json: layer_types: must be {num_layers} (num_hidden_layers) times {FULL!r} or {LINEAR!r}"
        )
    if FULL not in kinds:
        raise ValueError(f"{source}: config.json: layer_types has no {FULL!r}; models without attention are not served")
    return frozenset(i for i, kind in enumerate(kinds) if kind == LINEAR)


def _experts(config: dict[str, Any], num_layers: int, source: str) -> Experts:
    routing = Routing(
        num_experts=num_experts_of(config, source),
        experts_per_token=size_of(config, "num_experts_per_tok", source),
        normalise=flag_of(config, "norm_topk_prob", source, True),
        shared_gate=True,
    )
    routing.check(source)
    step, without = size_of(config, "decoder_sparse_step", source, 1), ids_of(config, "mlp_only_layers", source)
    return Experts(
        routing=routing,
        width=size_of(config, "moe_intermediate_size", source),
        shared_width=size_of(config, "shared_expert_intermediate_size", source),
        layers=frozenset(i for i in range(num_layers) if i not in without and (i + 1) % step == 0),
    )


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
    mlp: FeedForward
    if config.experts is not None and layer in config.experts.layers:
        experts = config.experts
        mlp = MixtureOfExperts(
            config.hidden_size,
            experts.width,
            experts.routing,
            group,
            experts.shared_width,
            config.whole_experts,
        )
    else:
        mlp = make_mlp(config, group)
    return DecoderLayer(config.hidden_size, config.rms_eps, attention, mlp, group, ZeroCentredRMSNorm)


class HybridForCausalLM(LlamaForCausalLM):
    make_layer = staticmethod(make_layer)
    norm_type = ZeroCentredRMSNorm
