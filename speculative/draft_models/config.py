"""What the config.json of EAGLE's and EAGLE-3's checkpoints have in common, and whether a draft fits its target."""

from collections.abc import Mapping
from typing import Any

from workers.models.config import ModelConfig, architecture_of
from workers.models.llama import LlamaConfig, read_config

_REFUSED_FLAGS = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")


def draft_architecture(raw: Mapping[str, Any]) -> str:
    """A Llama's where the checkpoint does not say, as some published EAGLE heads do not."""
    return architecture_of(dict(raw), "LlamaForCausalLM")


def read_layer(path: str, raw: Mapping[str, Any]) -> LlamaConfig:
    """Of the draft's one layer. Raises ValueError if there are more."""
    model = read_config({"num_hidden_layers": 1, **raw}, f"draft {path}")
    if model.num_layers != 1:
        raise ValueError(f"draft {path}: num_hidden_layers={model.num_layers}; only heads of one layer are supported")
    return model


def check_fit(path: str, model: ModelConfig, raw: Mapping[str, Any], target: ModelConfig) -> None:
    """Raise ValueError that names draft, target and remedy if the draft is another target's, or has what would be
    ignored."""
    source = f"draft {path}"
    flags = {**raw, **(raw.get("eagle_config") or {})}
    set_flags = [name for name in _REFUSED_FLAGS if flags.get(name)]
    if set_flags:
        raise ValueError(f"{source}: {', '.join(set_flags)} is not supported; use a head without it")
    made_for = int(raw.get("target_hidden_size") or model.hidden_size)
    if made_for != target.hidden_size:
        raise ValueError(
            f"{source}: was made for a target of hidden_size={made_for}, the target "
            f"({target.architecture}) has hidden_size={target.hidden_size}; use the head that was trained "
            "for this target"
        )
    if model.hidden_size != target.hidden_size:
        raise ValueError(
            f"{source}: has hidden_size={model.hidden_size} of its own, the target has "
            f"{target.hidden_size}; heads of another width than their target's are not supported"
        )
    if model.vocab_size != target.vocab_size:
        raise ValueError(
            f"{source}: vocab_size={model.vocab_size}, the target ({target.architecture}) has vocab_size="
            f"{target.vocab_size}; use the head that was trained for this target"
        )
