"""Gemma 2 and 3: norms before and after attention and MLP, windows in most layers, GELU, scaled embeddings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.norm.norm import ACTIVATIONS
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.decoder_layer import SandwichLayer
from aerie.workers.layers.moe import GatedMLP
from aerie.workers.layers.norm import ZeroCentredRMSNorm
from aerie.workers.layers.rotary import RopeConfig
from aerie.workers.models import llama
from aerie.workers.models.config import rope_of, text_part
from aerie.workers.models.config_fields import architecture_of, flag_of, number_of, size_of
from aerie.workers.models.llama import LlamaForCausalLM, make_attention, text_weight_names
from aerie.workers.models.mistral import FULL, SLIDING, LocalRopeConfig, ropes_of, windows_of
from aerie.workers.models.registry import ModelFamily

# transformers' defaults for fields that config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192},
    "Gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072},
}
_DEFAULTS["Gemma2"] |= {"vocab_size": 256000, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_DEFAULTS["Gemma3"] |= {"vocab_size": 262208, "rope_theta": 1000000.0}
_COMMON = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True}
_PATTERN = {"Gemma2": 2, "Gemma3": 6}  # one layer in so many has no window: the last


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(LocalRopeConfig):
    """See `LocalRopeConfig`.

    query_scale: factor on scores, before soft_cap.
    soft_cap, within_images: see `ScoreRule`.
    activation: activation of MLPs.
    """

    query_scale: float
    soft_cap: float | None
    activation: str
    within_images: bool

    def score_rule(self, layer: int) -> ScoreRule:
        return ScoreRule(self.query_scale, self.windows[layer], self.soft_cap, within_images=self.within_images)


def read_config(config: dict[str, Any], source: str) -> GemmaConfig:
    """Read the configuration of a text model, or the text_config of a model of images and text. Raises ValueError for
    settings that are not supported."""
    kind, within_images = architecture_of(config)[:6], "vision_config" in config
    config = _COMMON | _DEFAULTS[kind] | _declared(text_part(config, source))
    activation = activation_of(config, source)
    if flag_of(config, "use_bidirectional_attention", source):
        raise ValueError(f"{source}: use_bidirectional_attention=true: tokens that see later ones are not supported")
    soft_cap = cap_of(config, "attn_logit_softcapping", source)
    if kind == "Gemma3" and soft_cap is not None:
        raise ValueError(
            f"{source}: attn_logit_softcapping={soft_cap:g}: Gemma 3 has no cap on scores; transformers ignores it; "
            "set null"
        )
    rope, local = _ropes(config, source)
    dense = llama.read_config({**config, "hidden_act": "silu", "rope_parameters": None, "rope_scaling": None}, source)
    period = size_of(config, "sliding_window_pattern", source, _PATTERN[kind])
    pattern = tuple(FULL if (i + 1) % period == 0 else SLIDING for i in range(dense.num_layers))
    own = vars(dense) | {"rope": rope, "qk_norm": kind == "Gemma3", "embedding_scale": dense.hidden_size**0.5}
    own |= {"logit_cap": cap_of(config, "final_logit_softcapping", source)}
    return GemmaConfig(
        **own,
        windows=windows_of(config, dense.num_layers, dense.max_position, source, pattern),
        is_local=tuple(kind == SLIDING for kind in config.get("layer_types") or pattern),
        local_rope=local,
        query_scale=number_of(config, "query_pre_attn_scalar", source, 256.0) ** -0.5,
        soft_cap=soft_cap,
        activation=activation,
        within_images=within_images,
    )


def _declared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null, and soft caps, whose null means no cap, not the default."""
    return {key: value for key, value in config.items() if value is not None or key.endswith("softcapping")}


def activation_of(config: Mapping[str, Any], source: str) -> str:
    """Return the name of the MLPs' activation. Raises ValueError for others than `ACTIVATIONS`."""
    activation = str(config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh")
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"{source}: hidden_activation={activation!r} is not supported; it is one of {known}")
    return activation


def cap_of(config: Mapping[str, Any], key: str, source: str) -> float | None:
    """Return a soft cap; None: no cap."""
    return None if config.get(key) is None else number_of(config, key, source, 1.0)


def _ropes(config: dict[str, Any], source: str) -> tuple[RopeConfig, RopeConfig]:
    """Return RoPE of layers without and with a window, also from the fields of older exporters."""
    ropes = ropes_of(config, source, 10000.0, 10000.0)
    if ropes is not None:
        return ropes
    rope = rope_of(config, source)
    if architecture_of(config).startswith("Gemma2"):
        return rope, rope
    return rope, RopeConfig(theta=number_of(config, "rope_local_base_freq", source, 10000.0))


def make_layer(config: GemmaConfig, layer: int, group: TPGroup) -> SandwichLayer:
    attention = make_attention(config, layer, group, config.hidden_size, ZeroCentredRMSNorm)
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, group, config.activation)
    return SandwichLayer(config.hidden_size, config.rms_eps, attention, mlp, group, ZeroCentredRMSNorm)


class GemmaForCausalLM(LlamaForCausalLM):
    make_layer = staticmethod(make_layer)
    norm_type = ZeroCentredRMSNorm
    rounds_scale = True


FAMILY = ModelFamily(read_config, GemmaForCausalLM, text_weight_names)
