"""Mistral, Ministral and the text part of Mistral 3: Llama layers, all or some with sliding windows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attention.scores import ScoreRule
from workers.layers.rotary import RopeConfig
from workers.models import llama
from workers.models.config import text_part
from workers.models.family import ModelFamily
from workers.models.layer_kinds import FULL, SLIDING, windows_of
from workers.models.llama import LlamaConfig, LlamaForCausalLM, text_weight_names


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


def is_served(config: Mapping[str, Any]) -> bool:
    """Return False, so that the adapter serves the model, for text parts of another model_type (Ministral 3)."""
    text = config.get("text_config")
    return not isinstance(text, dict) or text.get("model_type") == "mistral"


FAMILY = ModelFamily(read_config, LlamaForCausalLM, text_weight_names, is_served)
