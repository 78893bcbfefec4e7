"""DeepSeek-V2 and V3 (R1, V3.1, Kimi-K2): multi-head latent attention (MLA), and mixtures of experts after the first
layers."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from attention.capability import Capability
from attention.kv_cache.latent import LatentLayout
from attention.kv_cache.layout import LayerGroup
from attention.scores import ScoreRule
from workers.distributed.tp_group import TPGroup
from workers.layers.decoder_layer import DecoderLayer, FeedForward
from workers.layers.latent_attention import LatentAttention
from workers.layers.mlp import GatedMLP
from workers.layers.moe import MixtureOfExperts
from workers.layers.rotary import RopeConfig, RotaryTable, yarn_magnitude
from workers.models.config import ModelConfig, dtype_of, mscale_of, rope_of, rope_scaling_of
from workers.models.config_fields import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_POSITIONS,
    architecture_of,
    flag_of,
    ids_of,
    number_of,
    size_of,
)
from workers.models.decoder import Decoder
from workers.models.family import ModelFamily
from workers.models.moe import check_experts_device, expert_cuts, expert_inputs, moe_rules, num_experts_of
from workers.models.name_map import NameMap
from workers.ops.experts.route import Routing
from workers.quantization.table import read_quant_method

# transformers' defaults for fields that config.json leaves out.
_V3_DEFAULTS = {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """See `ModelConfig`.

    num_kv_heads, head_dim: 1, and the size of a latent row.
    q_rank, latent, key_dim, rotated_dim, value_dim, attention_scale: see `LatentAttention`.
    intermediate_size: size for layers without experts.
    expert_width: intermediate size of an expert.
    shared_width: intermediate size of a layer's shared experts together.
    first_moe_layer, moe_layer_step: a layer has experts if it is not before first_moe_layer and a multiple of
        moe_layer_step.
    num_mtp_layers: MTP modules in the checkpoint, after its layers.
    """

    rope: RopeConfig
    q_rank: int | None
    latent: int
    key_dim: int
    rotated_dim: int
    value_dim: int
    attention_scale: float
    intermediate_size: int
    routing: Routing
    expert_width: int
    shared_width: int
    first_moe_layer: int
    moe_layer_step: int
    num_mtp_layers: int

    def has_experts(self, layer: int) -> bool:
        return layer >= self.first_moe_layer and layer % self.moe_layer_step == 0

    def check_shards(self, tensor_parallel: int, source: str) -> None:
        experts = expert_cuts(self.routing, self.expert_width, self.shared_width, self.whole_experts)
        cut = {"num_attention_heads": self.num_heads} | experts
        if not all(self.has_experts(layer) for layer in range(self.num_layers)):
            cut["intermediate_size"] = self.intermediate_size

        def fits(size: int) -> bool:
            return not any(total % size for total in cut.values())

        if not fits(tensor_parallel):
            named = ", ".join(f"{name}={total}" for name, total in cut.items())
            works = [n for n in range(1, self.num_heads + 1) if fits(n)]
            raise ValueError(
                f"tensor_parallel={tensor_parallel}: does not divide {source} ({named}); try one of {works}"
            )

    def with_whole_experts(self, source: str) -> Self:
        return replace(self, whole_experts=True)

    def check_device(self, device: Capability, dtype: torch.dtype, source: str) -> None:
        check_experts_device(device, dtype, source)

    def score_rule(self, layer: int) -> ScoreRule:
        return ScoreRule(self.attention_scale)

    def kv_groups(self, tensor_parallel: int, dtype: torch.dtype) -> tuple[LayerGroup, ...]:
        layout = LatentLayout(self.latent, self.rotated_dim, dtype)
        return (LayerGroup(tuple(range(self.num_layers)), layout),)

    def linear_inputs(self, tensor_parallel: int) -> dict[str, int]:
        inputs = {
            "hidden_size": self.hidden_size,
            "num_attention_heads * v_head_dim": self.num_heads * self.value_dim // tensor_parallel,
            "intermediate_size": self.intermediate_size // tensor_parallel,
            **expert_inputs(self.expert_width, self.shared_width, self.whole_experts, tensor_parallel),
        }
        return inputs if self.q_rank is None else inputs | {"q_lora_rank": self.q_rank}


def read_config(config: dict[str, Any], source: str) -> DeepseekConfig:
    """Read config.json. Raises ValueError for unsupported settings."""
    _refuse_unsupported(config, source)
    is_v3 = architecture_of(config) == "DeepseekV3ForCausalLM"
    config = {**(_V3_DEFAULTS if is_v3 else {}), **config}
    latent = size_of(config, "kv_lora_rank", source)
    key_dim, rotated_dim = (size_of(config, f"qk_{part}_head_dim", source) for part in ("nope", "rope"))
    if rotated_dim % 2:
        raise ValueError(f"{source}: config.json: qk_rope_head_dim={rotated_dim}: must be even: pairs are rotated")
    width = size_of(config, "moe_intermediate_size", source)
    rope = rope_of(config, source)
    return DeepseekConfig(
        architecture=architecture_of(config),
        hidden_size=size_of(config, "hidden_size", source),
        num_layers=size_of(config, "num_hidden_layers", source, most=MAX_LAYERS),
        num_heads=size_of(config, "num_attention_heads", source),
        num_kv_heads=1,
        head_dim=latent + rotated_dim,
        vocab_size=size_of(config, "vocab_size", source),
        max_position=size_of(config, "max_position_embeddings", source, 2048, most=MAX_POSITIONS),
        rms_eps=number_of(config, "rms_norm_eps", source, 1e-6),
        tie_embeddings=flag_of(config, "tie_word_embeddings", source),
        dtype=dtype_of(config),
        quant=read_quant_method(config, source),
        eos_token_ids=ids_of(config, "eos_token_id", source),
        rope=rope,
        q_rank=None if config.get("q_lora_rank") is None else size_of(config, "q_lora_rank", source),
        latent=latent,
        key_dim=key_dim,
        rotated_dim=rotated_dim,
        value_dim=size_of(config, "v_head_dim", source),
        attention_scale=(key_dim + rotated_dim) ** -0.5 * _scale_of_yarn(config, rope, source),
        intermediate_size=size_of(config, "intermediate_size", source),
        routing=read_routing(config, source, is_v3),
        expert_width=width,
        shared_width=size_of(config, "n_shared_experts", source, 0, least=0, most=MAX_EXPERTS) * width,
        first_moe_layer=size_of(config, "first_k_dense_replace", source, 0, least=0),
        moe_layer_step=size_of(config, "moe_layer_freq", source, 1),
        num_mtp_layers=size_of(config, "num_nextn_predict_layers", source, 0, least=0, most=MAX_LAYERS),
    )


def _scale_of_yarn(config: dict[str, Any], rope: RopeConfig, source: str) -> float:
    """Return YaRN's factor on q . k, in addition to the one on cos and sin."""
    mscale = mscale_of(rope_scaling_of(config, source), "mscale_all_dim", source)
    return yarn_magnitude(rope.factor, mscale) ** 2 if rope.kind == "yarn" else 1.0


def read_routing(config: dict[str, Any], source: str, is_v3: bool) -> Routing:
    """Read the router's settings. is_v3: defaults are DeepSeek-V3's, else V2's."""
    method = str(config.get("topk_method") or ("noaux_tc" if is_v3 else "greedy"))
    methods = ("greedy", "group_limited_greedy", "noaux_tc")
    if method not in methods:
        raise ValueError(f"{source}: topk_method={method!r} is not supported; it is one of {', '.join(methods)}")
    normalise = flag_of(config, "norm_topk_prob", source, is_v3)
    if normalise and not is_v3:
        raise ValueError(
            f"{source}: norm_topk_prob=true is not supported in DeepSeek-V2: its published code divides the experts' "
            "weights by their sum, transformers does not; use a checkpoint with false"
        )
    routing = Routing(
        num_experts=num_experts_of(config, source),
        experts_per_token=size_of(config, "num_experts_per_tok", source),
        scoring=str(config.get("scoring_func") or ("sigmoid" if is_v3 else "softmax")),
        num_groups=1 if method == "greedy" else size_of(config, "n_group", source, 1),
        groups_per_token=1 if method == "greedy" else size_of(config, "topk_group", source, 1),
        best_of_group=2 if method == "noaux_tc" else 1,
        has_bias=method == "noaux_tc",
        normalise=normalise,
        scale=number_of(config, "routed_scaling_factor", source, 1.0),
    )
    routing.check(source)
    return routing


def _refuse_unsupported(config: dict[str, Any], source: str) -> None:
    for key, only in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("rope_interleave", True),
    ):
        value = config.get(key)
        if value is not None and value != only:
            raise ValueError(f"{source}: {key}={value!r} is not supported; only {only!r} is")


class DeepseekForCausalLM(Decoder):
    """See `Decoder`. max_position: rows of the rotary table, on `device`."""

    def __init__(
        self,
        config: DeepseekConfig,
        group: TPGroup,
        max_position: int,
        device: torch.device,
        capture: tuple[int, ...] = (),
    ) -> None:
        rotary = RotaryTable(config.rope, config.rotated_dim, max_position, device)
        layers = [make_layer(config, layer, group) for layer in range(config.num_layers)]
        super().__init__(config, group, rotary, layers, capture)


def make_layer(config: DeepseekConfig, layer: int, group: TPGroup) -> DecoderLayer:
    mlp: FeedForward
    if config.has_experts(layer):
        mlp = MixtureOfExperts(
            config.hidden_size,
            config.expert_width,
            config.routing,
            group,
            shared_width=config.shared_width,
            whole_experts=config.whole_experts,
        )
    else:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, group)
    attention = LatentAttention(
        layer,
        group,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        q_rank=config.q_rank,
        latent=config.latent,
        key_dim=config.key_dim,
        rotated_dim=config.rotated_dim,
        value_dim=config.value_dim,
        scale=config.attention_scale,
    )
    return DecoderLayer(config.hidden_size, config.rms_eps, attention, mlp, group)


def layer_rules(ours: str, theirs: str) -> dict[str, str]:
    """Return the rules of a `NameMap` for one layer. ours, theirs: its path and its name in the checkpoint."""
    return moe_rules(ours, theirs) | {
        f"{ours}.self_attn.qkv_a": f"{theirs}.self_attn.{{part}}",
        f"{ours}.mlp.gate_up": f"{theirs}.mlp.{{part}}",
        f"{ours}.{{block}}.{{module}}": f"{theirs}.{{block}}.{{module}}",
        f"{ours}.{{norm}}": f"{theirs}.{{norm}}",
    }


def weight_names(config: DeepseekConfig) -> NameMap:
    """Return the names in Hugging Face's checkpoints. Ignored: MTP modules."""
    drafting = (f"model.layers.{config.num_layers + i}.*" for i in range(config.num_mtp_layers))
    return NameMap(
        rules={name: f"model.{name}" for name in ("embed_tokens", "norm")}
        | {"lm_head": "lm_head"}
        | layer_rules("layers.{layer}", "model.layers.{layer}"),
        ignored=("*.rotary_emb.inv_freq", *drafting, *(("lm_head.weight",) if config.tie_embeddings else ())),
    )


FAMILY = ModelFamily(read_config, DeepseekForCausalLM, weight_names)
