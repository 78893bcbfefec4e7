"""Llama 2 and 3, Qwen2 and Qwen3 (dense): grouped-query attention and a gated MLP in every layer, which differ in three
flags. EAGLE heads (`aerie.speculative.drafts`) use the same layers. Also says which layers of a Qwen attend to a
window: the adapter serves such models, and block drafts have such windows."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from aerie.attention.kv_cache.layout import HeadsLayout, LayerGroup
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.attention import Attention
from aerie.workers.layers.decoder_layer import DecoderLayer
from aerie.workers.layers.moe import GatedMLP
from aerie.workers.layers.norm import RMSNorm
from aerie.workers.layers.rotary import RopeConfig, rotary_tables
from aerie.workers.models.config import ROPE_KINDS, ModelConfig, check_cuts, decoder_fields, rope_of
from aerie.workers.models.config_fields import MAX_LAYERS, architecture_of, flag_of, size_of
from aerie.workers.models.decoder import Decoder, in_default_dtype
from aerie.workers.models.name_map import NameMap, decoder_names, text_part_names
from aerie.workers.models.registry import ModelFamily

_SLIDING = "sliding_attention"
_FULL_LAYERS = 28  # transformers' default of max_window_layers
_WITH_WINDOWS = re.compile("Qwen([23])(Moe)?For")  # no other architecture reads use_sliding_window


def layers_with_windows(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers with a window, as in transformers' configurations and attention (5.x).

    config: config.json of a decoder, unchecked; fields of a wrong kind count as missing, and the families refuse them.
    """
    family = _WITH_WINDOWS.match(architecture_of(config))
    layers = range(_number(config, "num_hidden_layers", 0))
    if family is None or not config.get("use_sliding_window") or config.get("sliding_window", 1) is None:
        return frozenset()
    if family.groups() == ("3", "Moe"):
        return frozenset(layers)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return frozenset(i for i in layers if kinds[i : i + 1] == [_SLIDING])
    bound = _number(config, "max_window_layers", _FULL_LAYERS)
    if family[2]:  # Qwen2's experts: every other layer before the bound
        return frozenset(layers[:bound:2])
    return frozenset(layers[bound:])


def _number(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_LAYERS else default


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """See `ModelConfig`.

    rotated_dim: dimensions of a head that RoPE rotates; all in Llama.
    qkv_bias: in Qwen2; in a Llama with attention_bias together with o_bias.
    qk_norm: an RMSNorm per head on q and k (Qwen3).
    mlp_name: what config.json calls intermediate_size.
    embedding_scale, logit_cap, logit_divisor: see `Decoder`.
    """

    intermediate_size: int
    rope: RopeConfig
    rotated_dim: int
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    mlp_name: str = "intermediate_size"
    embedding_scale: float | None = None
    logit_cap: float | None = None
    logit_divisor: float = 1.0

    @property
    def layer_ropes(self) -> tuple[RopeConfig, ...]:
        """RoPE of each layer."""
        return (self.rope,) * self.num_layers

    @property
    def cut_sizes(self) -> dict[str, int]:
        """Sharded intermediate sizes, by config.json's names."""
        return {self.mlp_name: self.intermediate_size}

    def check_shards(self, tensor_parallel: int, source: str) -> None:
        heads, kv = self.num_heads, self.num_kv_heads
        if heads % kv:
            raise ValueError(f"{source}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv}")
        check_cuts(tensor_parallel, source, heads, self.cut_sizes, (kv,))

    def kv_groups(self, tensor_parallel: int, dtype: torch.dtype) -> tuple[LayerGroup, ...]:
        layout = HeadsLayout(self.num_kv_heads_per_rank(tensor_parallel), self.head_dim, dtype)
        return (LayerGroup(tuple(range(self.num_layers)), layout),)

    def linear_inputs(self, tensor_parallel: int) -> dict[str, int]:
        return {
            "hidden_size": self.hidden_size,
            "num_attention_heads * head_dim": self.num_heads * self.head_dim // tensor_parallel,
            self.mlp_name: self.intermediate_size // tensor_parallel,
        }


def read_config(config: dict[str, Any], source: str) -> LlamaConfig:
    """Read config.json of a target or draft. Raises ValueError for settings that are not supported."""
    fields = decoder_fields(config, source, "LlamaForCausalLM")
    heads, architecture = fields["num_heads"], fields["architecture"]
    _refuse_unsupported(config, source)
    has_bias = flag_of(config, "attention_bias", source)
    head_dim = _head_dim(config, fields["hidden_size"], heads, source)
    return LlamaConfig(
        **fields,
        num_kv_heads=size_of(config, "num_key_value_heads", source, heads),
        head_dim=head_dim,
        intermediate_size=size_of(config, "intermediate_size", source),
        rope=rope_of(config, source),
        rotated_dim=head_dim,
        qkv_bias=architecture.startswith("Qwen2") or has_bias,
        o_bias=has_bias and not architecture.startswith("Qwen2"),
        qk_norm=architecture.startswith("Qwen3"),
    )


def _head_dim(config: dict[str, Any], hidden: int, heads: int, source: str) -> int:
    """Return the dimension of a head. Raises ValueError for an odd one."""
    size = size_of(config, "head_dim", source, hidden // heads)
    if size < 2 or size % 2:
        raise ValueError(
            f"{source}: config.json: head_dim={size} (hidden_size={hidden}, num_attention_heads={heads}): must be even "
            "and at least 2, because RoPE rotates pairs; correct it, or download the checkpoint again"
        )
    return size


def _refuse_unsupported(config: dict[str, Any], source: str) -> None:
    """Raise ValueError for values of the configuration that the model does not implement."""
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise ValueError(f"{source}: hidden_act={act!r} is not supported; only silu is")
    if config.get("mlp_bias"):
        raise ValueError(f"{source}: mlp_bias=true is not supported; use a checkpoint without it")
    size_of(config, "max_window_layers", source, 0, min_value=0)
    if layers_with_windows(config):
        raise ValueError(
            f"{source}: sliding-window attention is not supported; set use_sliding_window=false if the "
            "model works without it"
        )


def is_served(config: Mapping[str, Any]) -> bool:
    """Return False, so that the adapter serves the model, for other activations, MLPs with biases, other kinds of RoPE
    (`longrope`, `dynamic`) and Qwen2's windows."""
    scalings = _ropes_in(config.get("rope_parameters") or config.get("rope_scaling"))
    kinds = {str(scaling.get("rope_type") or scaling.get("type") or "default") for scaling in scalings}
    plain = config.get("hidden_act") in (None, "silu") and not config.get("mlp_bias")
    return plain and kinds.issubset(ROPE_KINDS) and not layers_with_windows(config)


def _ropes_in(scaling: Any) -> list[dict[str, Any]]:
    """Return the RoPE settings, for all layers or by kind of layer."""
    ropes = [scaling, *scaling.values()] if isinstance(scaling, dict) else []
    return [rope for rope in ropes if isinstance(rope, dict)]


def make_attention(
    config: LlamaConfig,
    layer: int,
    group: TPGroup,
    input_size: int,
    norm: type[RMSNorm] = RMSNorm,
    gated: bool = False,
    norms_projections: bool = False,
) -> Attention:
    """Return a layer's attention. layer: index in the KV pool. input_size: hidden_size, or twice that in an EAGLE-3
    head. norm, gated, norms_projections: see `Attention`."""
    return Attention(
        layer,
        group,
        input_size=input_size,
        output_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        norm_eps=config.rms_eps if config.qk_norm else None,
        norm=norm,
        norms_projections=norms_projections,
        gated=gated,
        rule=config.score_rule(layer),
    )


def make_mlp(config: LlamaConfig, group: TPGroup) -> GatedMLP:
    return GatedMLP(config.hidden_size, config.intermediate_size, group)


def make_layer(config: LlamaConfig, layer: int, group: TPGroup) -> DecoderLayer:
    attention = make_attention(config, layer, group, config.hidden_size)
    return DecoderLayer(config.hidden_size, config.rms_eps, attention, make_mlp(config, group), group)


class LlamaForCausalLM(Decoder):
    """See `Decoder`. Families with other layers override `make_layer` and `norm_type`.

    rounds_scale: embedding_scale is rounded to the model's dtype.
    max_position: rows of the rotary tables, on `device`.
    """

    make_layer: ClassVar[Callable[..., DecoderLayer]] = staticmethod(make_layer)
    norm_type: ClassVar[type[RMSNorm]] = RMSNorm
    rounds_scale: ClassVar[bool] = False

    def __init__(
        self,
        config: LlamaConfig,
        group: TPGroup,
        max_position: int,
        device: torch.device,
        capture: tuple[int, ...] = (),
    ) -> None:
        rotary = rotary_tables(config.layer_ropes, config.rotated_dim, max_position, device)
        layers = [self.make_layer(config, layer, group) for layer in range(config.num_layers)]
        scale = config.embedding_scale
        scale = in_default_dtype(scale) if self.rounds_scale and scale is not None else scale
        factors = (scale, config.logit_cap, config.logit_divisor)
        super().__init__(config, group, rotary, layers, capture, self.norm_type, *factors)


def layer_rules(path: str, name: str) -> dict[str, str]:
    """Return the rules of a `NameMap` for one layer. path, name: its path and its name in the checkpoint."""
    return {
        f"{path}.self_attn.qkv": f"{name}.self_attn.{{part}}",
        f"{path}.mlp.gate_up": f"{name}.mlp.{{part}}",
        f"{path}.{{block}}.{{module}}": f"{name}.{{block}}.{{module}}",
        f"{path}.{{norm}}": f"{name}.{{norm}}",
    }


def weight_names(config: LlamaConfig) -> NameMap:
    """Return the names in Hugging Face's checkpoints."""
    return decoder_names(layer_rules, config.tie_embeddings)


def text_weight_names(config: LlamaConfig) -> NameMap:
    """Return `weight_names`, also for models of images and text, whose names have a prefix and whose towers are
    ignored."""
    return text_part_names(weight_names(config))


FAMILY = ModelFamily(read_config, LlamaForCausalLM, weight_names, is_served)
