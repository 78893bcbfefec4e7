"""GLM-4.5, 4.6 and 4.7: Llama layers with partial RoPE, and DeepSeek-V3's experts after the first layers."""

from dataclasses import dataclass
from typing import Any

from workers.distributed.tp_group import TPGroup
from workers.layers.decoder_layer import DecoderLayer, FeedForward
from workers.layers.moe import MixtureOfExperts
from workers.models import llama
from workers.models.config import rotated_dim_of
from workers.models.config_fields import MAX_EXPERTS, MAX_LAYERS, flag_of, size_of
from workers.models.deepseek import read_routing
from workers.models.family import ModelFamily
from workers.models.llama import LlamaForCausalLM, make_attention, make_mlp
from workers.models.moe import LlamaMoeConfig, expert_cuts, expert_inputs, moe_rules
from workers.models.name_map import NameMap


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(LlamaMoeConfig):
    """See `LlamaConfig`.

    intermediate_size: size for layers without experts, which are those before first_moe_layer.
    expert_width: intermediate size of an expert.
    shared_width: intermediate size of a layer's shared experts together.
    num_mtp_layers: MTP modules in the checkpoint, after its layers.
    """

    expert_width: int
    shared_width: int
    first_moe_layer: int
    num_mtp_layers: int

    def has_experts(self, layer: int) -> bool:
        return layer >= self.first_moe_layer

    @property
    def cut_sizes(self) -> dict[str, int]:
        experts = expert_cuts(self.routing, self.expert_width, self.shared_width, self.whole_experts)
        return self._dense_sizes | experts

    @property
    def _dense_sizes(self) -> dict[str, int]:
        return super().cut_sizes if self.first_moe_layer > 0 else {}

    def linear_inputs(self, tensor_parallel: int) -> dict[str, int]:
        inputs = super().linear_inputs(tensor_parallel)
        if not self._dense_sizes:
            del inputs["intermediate_size"]
        return inputs | expert_inputs(self.expert_width, self.shared_width, self.whole_experts, tensor_parallel)


def read_config(config: dict[str, Any], source: str) -> Glm4MoeConfig:
    """Read config.json. Raises ValueError for unsupported settings."""
    dense = llama.read_config({"rms_norm_eps": 1e-5, **config}, source)
    width = size_of(config, "moe_intermediate_size", source)
    own = vars(dense) | {
        "o_bias": False,
        "qk_norm": flag_of(config, "use_qk_norm", source),
        "rotated_dim": rotated_dim_of(config, dense.head_dim, source, 0.5),
    }
    return Glm4MoeConfig(
        **own,
        routing=read_routing(config, source, is_v3=True),
        expert_width=width,
        shared_width=size_of(config, "n_shared_experts", source, 1, least=0, most=MAX_EXPERTS) * width,
        first_moe_layer=size_of(config, "first_k_dense_replace", source, 1, least=0),
        num_mtp_layers=size_of(config, "num_nextn_predict_layers", source, 0, least=0, most=MAX_LAYERS),
    )


def make_layer(config: Glm4MoeConfig, layer: int, group: TPGroup) -> DecoderLayer:
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
        mlp = make_mlp(config, group)
    attention = make_attention(config, layer, group, config.hidden_size)
    return DecoderLayer(config.hidden_size, config.rms_eps, attention, mlp, group)


class Glm4MoeForCausalLM(LlamaForCausalLM):
    make_layer = staticmethod(make_layer)


def layer_rules(ours: str, theirs: str) -> dict[str, str]:
    """Return the rules of a `NameMap` for one layer. ours, theirs: its path and its name in the checkpoint."""
    return moe_rules(ours, theirs) | {
        f"{ours}.self_attn.qkv": f"{theirs}.self_attn.{{part}}",
        f"{ours}.mlp.gate_up": f"{theirs}.mlp.{{part}}",
        f"{ours}.{{block}}.{{module}}": f"{theirs}.{{block}}.{{module}}",
        f"{ours}.{{norm}}": f"{theirs}.{{norm}}",
    }


def weight_names(config: Glm4MoeConfig) -> NameMap:
    """Return the names in Hugging Face's checkpoints. Ignored: MTP modules."""
    dense = llama.weight_names(config)
    drafting = tuple(f"model.layers.{config.num_layers + i}.*" for i in range(config.num_mtp_layers))
    return NameMap(
        layer_rules("layers.{layer}", "model.layers.{layer}") | dict(dense.rules), ignored=dense.ignored + drafting
    )


FAMILY = ModelFamily(read_config, Glm4MoeForCausalLM, weight_names)
