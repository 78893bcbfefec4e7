"""What a published draft checkpoint says of itself, and whether it fits its target. The one place that knows how
EAGLE and EAGLE-3 heads spell their configuration."""

from dataclasses import dataclass
from typing import Any

from speculative.config import Method, SpeculativeConfig
from workers.models.config import ModelConfig, read_config_json
from workers.models.llama import LlamaConfig, read_config

_REFUSED_FLAGS = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")


@dataclass(frozen=True)
class DraftConfig:
    """model: of the head's one layer. vocab_size: of the draft's own vocabulary. capture: layers of the target whose
    input the head reads; empty for EAGLE, which reads the final hidden state. fc_bias: EAGLE heads have one."""

    method: Method
    model: LlamaConfig
    vocab_size: int
    capture: tuple[int, ...]
    fc_bias: bool


def read_draft_config(speculative: SpeculativeConfig, target: ModelConfig) -> DraftConfig:
    """Read and check the draft's config.json against its target.

    Raises ValueError that names both and the remedy if they do not fit.
    """
    source = f"draft {speculative.path}"
    raw = read_config_json(speculative.path)
    model = read_config({"num_hidden_layers": 1, **raw}, source)
    _check_method(speculative, raw, source)
    _check_fit(model, raw, target, source)
    is_eagle3 = speculative.method == "eagle3"
    vocab_size = int(raw.get("draft_vocab_size") or raw["vocab_size"]) if is_eagle3 else target.vocab_size
    return DraftConfig(
        method=speculative.method,
        model=model,
        vocab_size=vocab_size,
        capture=_captured_layers(raw, target, source) if is_eagle3 else (),
        fc_bias=bool(raw.get("bias", not is_eagle3)),
    )


def _check_method(speculative: SpeculativeConfig, raw: dict[str, Any], source: str) -> None:
    """An EAGLE head run as EAGLE-3, or the reverse, would accept nothing and say nothing."""
    architecture = str((raw.get("architectures") or ["unknown"])[0])
    looks_like_eagle3 = "eagle3" in architecture.lower() or "draft_vocab_size" in raw
    if looks_like_eagle3 != (speculative.method == "eagle3"):
        right = "eagle3" if looks_like_eagle3 else "eagle"
        raise ValueError(
            f"speculative.method={speculative.method}: {source} is an {right} head "
            f"(architecture {architecture}); set method: {right}"
        )


def _check_fit(model: ModelConfig, raw: dict[str, Any], target: ModelConfig, source: str) -> None:
    if model.num_layers != 1:
        raise ValueError(f"{source}: num_hidden_layers={model.num_layers}; only heads of one layer are supported")
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


def _captured_layers(raw: dict[str, Any], target: ModelConfig, source: str) -> tuple[int, ...]:
    """Layers whose input is captured. Explicit ids name layers whose output is meant, hence + 1."""
    given = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    given = given or raw.get("eagle_aux_hidden_state_layer_ids")
    layers = target.num_layers
    capture = tuple(int(i) + 1 for i in given) if given else (2, layers // 2, layers - 3)
    if len(capture) != 3 or len(set(capture)) != 3 or not all(0 <= i < layers for i in capture):
        raise ValueError(
            f"{source}: captures the input of layers {capture}, which the target of {layers} layers does "
            "not have three of; set eagle_config.eagle_aux_hidden_state_layer_ids in the draft's config"
        )
    return capture
