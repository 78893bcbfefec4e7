"""Windows of layers, from `layer_types` and `sliding_window` of config.json, and RoPE by kind of layer."""

from typing import Any

from workers.layers.rotary import RopeConfig
from workers.models.config import rope_of
from workers.models.config_fields import number_of, section_of, size_of

FULL, SLIDING = "full_attention", "sliding_attention"


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
