"""Text models of Qwen3.5, 3.6 and 3.8, dense and with experts: the layers of Qwen3-Next. The vision tower is not
loaded."""

from typing import Any

from workers.models.config import text_part
from workers.models.family import ModelFamily
from workers.models.name_map import NameMap, Packed, split_rows
from workers.models.qwen import hybrid
from workers.models.qwen.hybrid import HybridConfig, HybridForCausalLM
from workers.models.qwen.hybrid_names import layer_rules, packed_experts
from workers.quantization.integers.format import split_outputs


def read_config(config: dict[str, Any], source: str) -> HybridConfig:
    """Read the configuration of a text model, or the text_config of a model of images and text."""
    return hybrid.read_config(text_part(config, source, text_first=True), source)


def _prefix(config: HybridConfig) -> str:
    """Return the prefix of the text model's tensor names in published checkpoints and in their lists of unquantised
    modules."""
    return "model.language_model" if config.architecture.endswith("ForConditionalGeneration") else "model"


def weight_names(config: HybridConfig) -> NameMap:
    prefix = _prefix(config)
    theirs = f"{prefix}.layers.{{layer}}"
    heads = config.heads
    keys, values = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
    rows = (keys, keys, values)
    qkv = Packed(
        f"{theirs}.linear_attn.in_proj_qkv.{{kind}}",
        tuple(f"{theirs}.linear_attn.in_proj_{part}.{{kind}}" for part in "qkv"),
        lambda full, kind: split_outputs(full, kind, rows, lambda matrix: split_rows(matrix, rows, "q, k and v")),
    )
    others = [(f"{other}.{each}.", f"{prefix}.{each}.") for other in _spellings(prefix) for each in _TEXT_MODULES]
    return NameMap(
        {
            "lm_head": "lm_head",
            "embed_tokens": f"{prefix}.embed_tokens",
            "norm": f"{prefix}.norm",
            **layer_rules("layers.{layer}", theirs),
        },
        aliases=tuple(others),
        ignored=("mtp.*", "model.visual.*", *(("lm_head.weight",) if config.tie_embeddings else ())),
        packed=(qkv, *packed_experts(config, theirs)),
    )


_TEXT_MODULES = ("layers", "embed_tokens", "norm")


def _spellings(prefix: str) -> tuple[str, ...]:
    """Return the other prefix, because text models are saved alone or in the whole model."""
    return tuple(each for each in ("model", "model.language_model") if each != prefix)


FAMILY = ModelFamily(read_config, HybridForCausalLM, weight_names)
