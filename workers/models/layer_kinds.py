"""The layers of a model that attend over a window, by `layer_types` and `sliding_window` of config.json."""

from typing import Any

from workers.models.config_fields import size_of

FULL, SLIDING = "full_attention", "sliding_attention"


def windows_of(
    config: dict[str, Any], num_layers: int, max_position: int, source: str, default: tuple[str, ...] | None = None
) -> tuple[int | None, ...]:
    """Return the window of each layer in tokens, the newest included; None: it attends to all, as with a window of
    `max_position` or more.

    default: kinds of the layers where config.json has no `layer_types`; None: alternating, the first one sliding.
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
