"""RoPE's settings in place of config.json's, for contexts longer than the checkpoint's (`model.rope_scaling`)."""

from collections.abc import Mapping
from typing import Any

_EXTENDS_ORIGINAL = ("yarn", "llama3")  # kinds whose longest context is original_max_position_embeddings * factor


def with_rope_scaling(config: dict[str, Any], scaling: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return config.json with `scaling` in the settings of RoPE of its token decoder, and the longest context that
    follows from them. Raises ValueError for layers with different settings."""
    if not scaling:
        return config
    if isinstance(config.get("text_config"), dict):
        return config | {"text_config": with_rope_scaling(config["text_config"], scaling, source)}
    section = "rope_parameters" if isinstance(config.get("rope_parameters"), dict) else "rope_scaling"
    present = config.get(section) or {}
    if any(isinstance(value, Mapping) for value in present.values()):
        raise ValueError(
            f"model.rope_scaling={dict(scaling)}: the layers of {source} have different settings of RoPE; change "
            "config.json in a copy of its folder"
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    merged = {**present, **scaling, "rope_type": kind}
    return config | {section: merged, "max_position_embeddings": _longest(config, merged, source)}


def _longest(config: Mapping[str, Any], scaling: Mapping[str, Any], source: str) -> int:
    present = config.get("max_position_embeddings", 2048)
    original = scaling.get("original_max_position_embeddings", present)
    factor = scaling.get("factor", 1.0)
    if not isinstance(factor, int | float) or not isinstance(original, int) or not isinstance(present, int):
        raise ValueError(f"model.rope_scaling={dict(scaling)}: factor and lengths of {source} must be numbers")
    if scaling["rope_type"] in _EXTENDS_ORIGINAL:
        return max(present, int(original * factor))
    return int(present * factor) if scaling["rope_type"] == "linear" else present
