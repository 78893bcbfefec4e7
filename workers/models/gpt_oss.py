"""gpt-oss: attention with sinks, over a window in every other layer; experts with biases and a clamped activation."""

from dataclasses import dataclass, replace
from typing import Any

from attention.scores import ScoreRule
from workers.distributed.tp_group import TPGroup
from workers.layers.decoder_layer import DecoderLayer
from workers.layers.moe import MixtureOfExperts
from workers.models import llama
from workers.models.config import rope_scaling_of
from workers.models.config_fields import number_of, size_of
from workers.models.family import ModelFamily
from workers.models.layer_kinds import windows_of
from workers.models.llama import LlamaForCausalLM, make_attention
from workers.models.moe import LlamaMoeConfig, expert_cuts, interleaved_experts, num_experts_of
from workers.models.name_map import NameMap
from workers.ops.experts.gated import GPT_OSS, GatedActivation
from workers.ops.experts.route import Routing

# transformers' defaults for fields that config.json leaves out.
_DEFAULTS = {"rope_theta": 150000.0, "attention_bias": True, "head_dim": 64, "rms_norm_eps": 1e-5}
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(LlamaMoeConfig):
    """See `LlamaConfig`.

    intermediate_size: size of an expert; every layer has experts.
    windows: each layer's window in tokens; None: no window.
    """

    activation: GatedActivation
    windows: tuple[int | None, ...]

    @property
    def cut_sizes(self) -> dict[str, int]:
        if self.whole_experts:
            return expert_cuts(self.routing, self.intermediate_size, 0, whole=True)
        return {"intermediate_size": self.intermediate_size}

    def score_rule(self, layer: int) -> ScoreRule:
        return ScoreRule(self.head_dim**-0.5, window=self.windows[layer], has_sinks=True)

    def linear_inputs(self, tensor_parallel: int) -> dict[str, int]:
        inputs = super().linear_inputs(tensor_parallel)
        return inputs | {"intermediate_size": self.intermediate_size} if self.whole_experts else inputs


def read_config(config: dict[str, Any], source: str) -> GptOssConfig:
    """Read config.json. Raises ValueError for unsupported settings."""
    if not rope_scaling_of(config, source):
        config = {**config, "rope_scaling": _DEFAULT_ROPE}
    if not config.get("dtype") and not config.get("torch_dtype"):
        config = {**config, "dtype": "bfloat16"}  # published configurations name none
    dense = llama.read_config({**_DEFAULTS, **config}, source)
    routing = Routing(
        num_experts=num_experts_of(config, source),
        experts_per_token=size_of(config, "num_experts_per_tok", source, 4),
        normalise=True,
        biased_logits=True,
    )
    routing.check(source)
    return GptOssConfig(
        **vars(dense),
        routing=routing,
        activation=replace(GPT_OSS, limit=number_of(config, "swiglu_limit", source, 7.0)),
        windows=windows_of(config, dense.num_layers, dense.max_position, source),
    )


def make_layer(config: GptOssConfig, layer: int, group: TPGroup) -> DecoderLayer:
    experts = MixtureOfExperts(
        config.hidden_size,
        config.intermediate_size,
        config.routing,
        group,
        whole_experts=config.whole_experts,
        activation=config.activation,
        biased_experts=True,
    )
    attention = make_attention(config, layer, group, config.hidden_size)
    return DecoderLayer(config.hidden_size, config.rms_eps, attention, experts, group)


class GptOssForCausalLM(LlamaForCausalLM):
    make_layer = staticmethod(make_layer)


def weight_names(config: GptOssConfig) -> NameMap:
    """Return the names in Hugging Face's checkpoints, whose experts are stacked, in MXFP4 or 16 bits."""
    dense, layer = llama.weight_names(config), "layers.{layer}"
    return NameMap(
        {
            f"{layer}.mlp.router": f"model.{layer}.mlp.router",
            f"{layer}.mlp.experts": f"model.{layer}.mlp.experts.{{expert}}.{{part}}",
            f"{layer}.self_attn.sinks": f"model.{layer}.self_attn",
            **dense.rules,
        },
        ignored=dense.ignored,
        packed=interleaved_experts(f"model.{layer}", config.routing.num_experts),
    )


FAMILY = ModelFamily(read_config, GptOssForCausalLM, weight_names)
