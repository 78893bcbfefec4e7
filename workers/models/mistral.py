"""Mistral, Ministral and the text part of Mistral 3: Llama layers, all or some with sliding windows. Other families
read windows, and RoPE by kind of layer, from config.json as this one does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aerie.kernels.attend.scores import ScoreRule
from aerie.workers.layers.rotary import RopeConfig
from aerie.workers.models import llama
from aerie.workers.models.config import rope_of, text_part
from aerie.workers.models.config_fields import number_of, section_of, size_of
from aerie.workers.models.llama import LlamaConfig, LlamaForCausalLM, text_weight_names
from aerie.workers.models.registry import ModelFamily

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(LlamaConfig):
    """See `LlamaConfig`. windows: each layer's window in tokens; None: no window."""

    windows: tuple[int | None, ...]

    def score_rule(self, layer: int) -> ScoreRule:
        return ScoreRule(self.head_dim**-0.5, window=self.windows[layer])


@dataclass(frozen=True, kw_only=True)
class LocalRopeConfig(WindowedConfig):
    """See `WindowedConfig`. is_local: for each layer, whether its RoPE is local_rope; includes layers whose window is
    max_position or more."""

    is_local: tuple[bool, ...]
    local_rope: RopeConfig

    @property
    def layer_ropes(self) -> tuple[RopeConfig, ...]:
        return tuple(self.local_rope if local else self.rope for local in self.is_local)


def read_config(config: dict[str, Any], source: str) -> WindowedConfig:
    """Read the configuration of a text model, or the text_config of a model of images and text. Raises ValueError for
    settings that are not supported."""
    config = text_part(config, source)
    dense = llama.read_config(config, source)
    kind = FULL if config.get("sliding_window") is None else SLIDING
    default = (kind,) * dense.num_layers
    return WindowedConfig(
        **vars(dense), windows=windows_of(config, dense.num_layers, dense.max_position, source, default)
    )


def windows_of(
    config: dict[str, Any], num_layers: int, max_position: int, source: str, default: tuple[str, ...] | None = None
) -> tuple[int | None, ...]:
    """Return each layer's window in tokens, including the newest; None: no window, or one of `max_position` or more.

    default: kinds of the layers if config.json has no `layer_types`; None: alternating, the first one sliding.
    Raises ValueError for other kinds, or if a sliding layer has no window.
    """
    alternating = tuple(FULL if i % 2 else SLIDING for i in range(num_layers))
    kinds = config.get("layer_types") or list(default or alternating)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {FULL, SLIDING}.issuperset(kinds):
        raise ValueError(
            f"{source}: config.json: layer_types: must be {num_layers} (num_hidden_layers) times {FULL!r} or "
            f"{SLIDING!r}; correct it, or download the checkpoint again"
        )
    if SLIDING not in kinds:
        return (None,) * num_layers
    window = size_of(config, "sliding_window", source)
    return tuple(window if kind == SLIDING and window < max_position else None for kind in kinds)


def ropes_of(
    config: dict[str, Any], source: str, full_theta: float, local_theta: float
) -> tuple[RopeConfig, RopeConfig] | None:
    """Return RoPE of layers without and with a window; None if `rope_parameters` is not by kind of layer.

    full_theta, local_theta: default bases.
    """
    nested = section_of(config, "rope_parameters", source)
    if FULL not in nested and SLIDING not in nested:
        return None
    full, local = (dict(section_of(nested, kind, source)) for kind in (FULL, SLIDING))
    default = number_of(config, "rope_theta", source, full_theta)
    return (
        rope_of({"rope_parameters": full, "rope_theta": default}, source),
        rope_of({"rope_parameters": local, "rope_theta": local_theta}, source),
    )


def is_served(config: Mapping[str, Any]) -> bool:
    """Return False, so that the adapter serves the model, for text parts of another model_type (Ministral 3)."""
    text = config.get("text_config")
    return not isinstance(text, dict) or text.get("model_type") == "mistral"


FAMILY = ModelFamily(read_config, LlamaForCausalLM, text_weight_names, is_served)
