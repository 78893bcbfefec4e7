"""DeepSeek-V2 and V3 (R1, V3.1, Kimi-K2): multi-head latent attention (MLA), and mixtures of experts after the first
layers. So has GLM-4.7-Flash, whose config.json lists the layers with experts."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from aerie.attention.kv_cache.layout import LatentLayout, LayerGroup
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import Capability
from aerie.kernels.experts.route import Routing
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import DecoderLayer, FeedForward
from aerie.workers.layers.latent_attention import LatentAttention
from aerie.workers.layers.moe import GatedMLP
from aerie.workers.layers.rotary import RopeConfig, RotaryTable, yarn_magnitude
from aerie.workers.models import llama
from aerie.workers.models.config import ModelConfig, check_cuts, decoder_fields, mscale_of, rope_of, rope_scaling_of
from aerie.workers.models.config_fields import MAX_EXPERTS, MAX_LAYERS, architecture_of, flag_of, number_of, size_of
from aerie.workers.models.decoder import Decoder
from aerie.workers.models.moe import ExpertLayers, moe_rules, num_experts_of
from aerie.workers.models.name_map import NameMap, decoder_names
from aerie.workers.models.registry import AFTER_LAYERS, ModelFamily

# transformers' defaults for fields that config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {},
    "DeepseekV3ForCausalLM": {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    "Glm4MoeLiteForCausalLM": {
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
_DENSE, _SPARSE = "dense", "sparse"


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """See `ModelConfig`.

    num_kv_heads, head_dim: 1, and the size of a latent row.
    q_rank, latent, key_dim, rotated_dim, value_dim, attention_scale: see `LatentAttention`.
    intermediate_size: size for layers without experts.
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
    experts: ExpertLayers
    num_mtp_layers: int

    def check_shards(self, tensor_parallel: int, source: str) -> None:
        dense = {"intermediate_size": self.intermediate_size} if self._has_mlps else {}
        check_cuts(tensor_parallel, source, self.num_heads, dense | self.experts.cut_sizes(self.whole_experts))

    @property
    def _has_mlps(self) -> bool:
        return not self.experts.layers.issuperset(range(self.num_layers))

    @property
    def recorded_routing(self) -> Routing | None:
        return self.experts.routing

    def with_whole_experts(self, source: str) -> Self:
        return replace(self, whole_experts=True)

    def check_device(self, device: Capability, dtype: torch.dtype, source: str) -> None:
        self.experts.check_device(device, dtype, source)

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
            **self.experts.linear_inputs(tensor_parallel),
        }
        return inputs if self.q_rank is None else inputs | {"q_lora_rank": self.q_rank}

    def expert_inputs(self, tensor_parallel: int) -> dict[str, int]:
        return self.experts.expert_inputs(self.whole_experts, tensor_parallel)


def read_config(config: dict[str, Any], source: str) -> DeepseekConfig:
    """Read config.json. Raises ValueError for unsupported settings."""
    _refuse_unsupported(config, source)
    kind = architecture_of(config)
    is_v3 = kind != "DeepseekV2ForCausalLM"
    config = _DEFAULTS[kind] | config
    if kind == "Glm4MoeLiteForCausalLM" and config.get("mlp_layer_types") is not None:
        config |= {"first_k_dense_replace": _num_dense(config, source)}
    latent = size_of(config, "kv_lora_rank", source)
    key_dim, rotated_dim = (size_of(config, f"qk_{part}_head_dim", source) for part in ("nope", "rope"))
    if rotated_dim % 2:
        raise ValueError(f"{source}: config.json: qk_rope_head_dim={rotated_dim}: must be even: pairs are rotated")
    rope = rope_of(config, source)
    return DeepseekConfig(
        **decoder_fields(config, source),
        num_kv_heads=1,
        head_dim=latent + rotated_dim,
        rope=rope,
        q_rank=None if config.get("q_lora_rank") is None else size_of(config, "q_lora_rank", source),
        latent=latent,
        key_dim=key_dim,
        rotated_dim=rotated_dim,
        value_dim=size_of(config, "v_head_dim", source),
        attention_scale=(key_dim + rotated_dim) ** -0.5 * _scale_of_yarn(config, rope, source),
        intermediate_size=size_of(config, "intermediate_size", source),
        experts=read_experts(config, source, is_v3),
        num_mtp_layers=AFTER_LAYERS.count(config, source) or 0,
    )


def _num_dense(config: dict[str, Any], source: str) -> int:
    """Return the number of layers without experts, which are the first ones."""
    layers = size_of(config, "num_hidden_layers", source, max_value=MAX_LAYERS)
    kinds = config["mlp_layer_types"]
    dense = kinds.index(_SPARSE) if isinstance(kinds, list) and _SPARSE in kinds else layers
    if kinds != [_DENSE] * dense + [_SPARSE] * (layers - dense):
        raise ValueError(
            f"{source}: config.json: mlp_layer_types: must be {layers} (num_hidden_layers) names, {_DENSE!r} and then "
            f"{_SPARSE!r}; layers of other kinds are not supported"
        )
    return dense


def _scale_of_yarn(config: dict[str, Any], rope: RopeConfig, source: str) -> float:
    """Return YaRN's factor on q . k, in addition to the one on cos and sin."""
    mscale = mscale_of(rope_scaling_of(config, source), "mscale_all_dim", source)
    return yarn_magnitude(rope.factor, mscale) ** 2 if rope.kind == "yarn" else 1.0


def read_experts(config: dict[str, Any], source: str, is_v3: bool) -> ExpertLayers:
    """Read which layers have experts, and what they are. is_v3: see `_read_routing`."""
    num_layers = size_of(config, "num_hidden_layers", source, max_value=MAX_LAYERS)
    num_layers += AFTER_LAYERS.count(config, source) or 0
    first = size_of(config, "first_k_dense_replace", source, 0, min_value=0)
    step = size_of(config, "moe_layer_freq", source, 1)
    width = size_of(config, "moe_intermediate_size", source)
    return ExpertLayers(
        routing=_read_routing(config, source, is_v3),
        layers=frozenset(layer for layer in range(first, num_layers) if layer % step == 0),
        width=width,
        shared_width=size_of(config, "n_shared_experts", source, 0, min_value=0, max_value=MAX_EXPERTS) * width,
    )


def _read_routing(config: dict[str, Any], source: str, is_v3: bool) -> Routing:
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
    """Raise ValueError for values of the configuration that the model does not implement."""
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
    """Return one decoder layer without weights."""
    experts, hidden = config.experts, config.hidden_size
    mlp: FeedForward
    if layer in experts.layers:
        mlp = experts.module(hidden, group, config.whole_experts)
    else:
        mlp = GatedMLP(hidden, config.intermediate_size, group)
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


def layer_rules(path: str, name: str) -> dict[str, str]:
    """Return the rules of a `NameMap` for one layer. path, name: its path and its name in the checkpoint."""
    latent = {f"{path}.self_attn.qkv_a": f"{name}.self_attn.{{part}}"}
    return moe_rules(path, name) | latent | llama.layer_rules(path, name)


def weight_names(config: DeepseekConfig) -> NameMap:
    """Return the names in Hugging Face's checkpoints. Ignored: MTP modules."""
    ignored = AFTER_LAYERS.names(config.num_layers, config.num_mtp_layers)
    return decoder_names(layer_rules, config.tie_embeddings, ignored=ignored)


FAMILY = ModelFamily(read_config, DeepseekForCausalLM, weight_names)
