"""Which layers of a Qwen2 or Qwen3 attend to a window. The adapter serves models with such layers, drafts with them are
refused, and block drafts have such windows; all ask here. Without torch."""

import re
from collections.abc import Mapping
from typing import Any

from aerie.workers.models.config_fields import MAX_LAYERS, architecture_of

_SLIDING = "sliding_attention"
_FULL_LAYERS = 28  # transformers' default of max_window_layers
_WITH_WINDOWS = re.compile("Qwen([23])(Moe)?For")  # no other architecture reads use_sliding_window


def layers_with_windows(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers with a window, as in transformers' configurations and attention (5.x).

    config: of a decoder, unchecked; fields of a wrong kind count as missing, and the families refuse them.
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
