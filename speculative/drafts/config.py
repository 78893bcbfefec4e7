"""Checks a draft's config.json: unknown fields, and whether the draft fits its target."""

from collections.abc import Mapping, Set
from typing import Any

from aerie.workers.models.config import ModelConfig
from aerie.workers.models.config_fields import section_of
from aerie.workers.models.llama import LlamaConfig, read_config


def read_layer(path: str, raw: Mapping[str, Any]) -> LlamaConfig:
    """Return the configuration of a draft's only layer. Raises ValueError if there are more."""
    model = read_config({"num_hidden_layers": 1, **raw}, f"draft {path}")
    if model.num_layers != 1:
        raise ValueError(f"draft {path}: num_hidden_layers={model.num_layers}; only heads of one layer are supported")
    return model


def check_target(path: str, model: ModelConfig, made_for: int, target: ModelConfig) -> None:
    """Raise ValueError, naming draft, target and remedy, if the draft is for another target.

    model: configuration of the draft's layers.
    made_for: hidden_size of the target that the draft was trained for.
    """
    source = f"draft {path}"
    if made_for != target.hidden_size:
        raise ValueError(
            f"{source}: was made for a target of hidden_size={made_for}, the target "
            f"({target.architecture}) has hidden_size={target.hidden_size}; use the head that was trained "
            "for this target"
        )
    if model.vocab_size != target.vocab_size:
        raise ValueError(
            f"{source}: vocab_size={model.vocab_size}, the target ({target.architecture}) has vocab_size="
            f"{target.vocab_size}; use the head that was trained for this target"
        )


def check_width(path: str, model: ModelConfig, target: ModelConfig, why: str) -> None:
    """Raise ValueError if the draft's hidden_size is not the target's. why: the reason for this rule."""
    if model.hidden_size != target.hidden_size:
        raise ValueError(
            f"draft {path}: hidden_size={model.hidden_size}, the target has {target.hidden_size}; {why}, so both must "
            "be equal"
        )


def refuse_unknown(
    source: str,
    fields: Mapping[str, Any],
    only: Mapping[str, Any],
    known: Set[str],
    prefix: str = "",
    strict: bool = False,
) -> None:
    """Raise ValueError for unknown flags, objects and lists, which may change the module. Unknown numbers and strings
    are accepted: they have no effect in any published head.

    only: fields with the one value that is supported; None: the field must be unset.
    known: other fields that are allowed.
    prefix: goes before the fields' names in errors.
    strict: refuse unknown numbers and strings, too.
    """
    for key, value in fields.items():
        if key in only and key not in known:
            supported = only[key]
            works = value is None or value == supported or (supported is None and not value)
            remedy = "use a head without it" if supported is None else f"only {supported!r} is; use a head with that"
        else:
            meaningful = value is True or isinstance(value, dict | list) or strict
            works = key in known or not value or not meaningful
            remedy = "use a head without it, or take the key out of config.json if the head does not depend on it"
        if not works:
            raise ValueError(f"{source}: {prefix}{key}={value!r} is not supported; {remedy}")


def read_section(
    source: str, raw: Mapping[str, Any], name: str, only: Mapping[str, Any], known: Set[str], strict: bool = False
) -> dict[str, Any]:
    """Return a section of config.json; {} without one. only, known, strict: see
    `refuse_unknown`. Raises ValueError."""
    section = dict(section_of(raw, name, source))
    refuse_unknown(source, section, only, known, f"{name}.", strict)
    return section


def speculators_layers(
    source: str, raw: Mapping[str, Any], only: Mapping[str, Any], known: Set[str], families: Mapping[str, str]
) -> dict[str, Any]:
    """Return config.json of the layers of a head in `speculators`' format.

    only, known: see `refuse_unknown`.
    families: architecture of the layers, by their model_type; the first is the default.
    Raises ValueError for other layers, or for a key that would be ignored.
    """
    section = "transformer_layer_config"
    layers = read_section(source, raw, section, only, known)
    kind = layers.get("model_type", next(iter(families)))
    if kind not in families:
        raise ValueError(
            f"{source}: {section}.model_type={kind!r} is not supported; use a head whose layers are of "
            f"{' or '.join(families)}"
        )
    outer = {key: raw[key] for key in ("quantization_config", "torch_dtype", "dtype") if key in raw}
    return {**layers, **outer, "architectures": [families[kind]], "tie_word_embeddings": False}
