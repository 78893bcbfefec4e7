"""gpt-oss: attention with sinks, over a window in every other layer; experts with biases and a clamped activation."""

from dataclasses import dataclass, replace
from typing import Any

from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.experts.gated import GPT_OSS
from aerie.kernels.experts.route import Routing
from aerie.workers.models import llama
from aerie.workers.models.config import rope_scaling_of
from aerie.workers.models.config_fields import number_of, size_of
from aerie.workers.models.mistral import windows_of
from aerie.workers.models.moe import (
    ExpertLayers,
    LlamaMoeConfig,
    LlamaMoeForCausalLM,
    interleaved_experts,
    moe_rules,
    num_experts_of,
)
from aerie.workers.models.name_map import NameMap, decoder_names
from aerie.workers.models.registry import ModelFamily

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
    """See `LlamaMoeConfig`. windows: each layer's window in tokens; None: it attends to all."""

    windows: tuple[int | None, ...]

    def score_rule(self, layer: int) -> ScoreRule:
        return ScoreRule(self.head_dim**-0.5, window=self.windows[layer], has_sinks=True)


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
        experts=ExpertLayers(
            routing=routing,
            layers=frozenset(range(dense.num_layers)),
            width=dense.intermediate_size,
            width_name="intermediate_size",
            activation=replace(GPT_OSS, limit=number_of(config, "swiglu_limit", source, 7.0)),
            biased=True,
        ),
        windows=windows_of(config, dense.num_layers, dense.max_position, source),
    )


def _layer_rules(path: str, name: str) -> dict[str, str]:
    sinks = {f"{path}.self_attn.sinks": f"{name}.self_attn"}
    return moe_rules(path, name, router="router") | sinks | llama.layer_rules(path, name)


def weight_names(config: GptOssConfig) -> NameMap:
    """Return the names in Hugging Face's checkpoints, whose experts are stacked, in MXFP4 or 16 bits."""
    assert config.experts is not None, "every layer has some"
    packed = interleaved_experts("model.layers.{layer}", config.experts.routing.num_experts)
    return decoder_names(_layer_rules, config.tie_embeddings, packed=packed)


FAMILY = ModelFamily(read_config, LlamaMoeForCausalLM, weight_names)
