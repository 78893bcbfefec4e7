"""Text models of Qwen3.5, 3.6 and 3.8, dense and with experts: the layers of Qwen3-Next. The vision
tower is `aerie.workers.vision`'s."""

from typing import Any

from aerie.workers.models.config import text_part, with_mrope
from aerie.workers.models.name_map import NameMap, Packed, decoder_names, split_rows
from aerie.workers.models.qwen import hybrid
from aerie.workers.models.qwen.hybrid import HybridConfig, HybridForCausalLM, layer_rules, packed_experts
from aerie.workers.models.registry import ModelFamily
from aerie.workers.quantization.integers.format import split_outputs


def read_config(config: dict[str, Any], source: str) -> HybridConfig:
    """Read the configuration of a text model, or the text_config of a model of images and text."""
    text = text_part(config, source, text_first=True)
    return hybrid.read_config(with_mrope(text, (11, 11, 10), interleaved=True), source)


_PREFIXES = ("model", "model.language_model")  # of a text model alone, and in a model of images
_TEXT_MODULES = ("layers", "embed_tokens", "norm")


def weight_names(config: HybridConfig) -> NameMap:
    """Return the names in published checkpoints and in their lists of unquantised modules. Text models are saved alone,
    or in the whole model."""
    prefix, other = _PREFIXES[::-1] if config.architecture.endswith("ForConditionalGeneration") else _PREFIXES
    name = f"{prefix}.layers.{{layer}}"
    heads = config.heads
    keys, values = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
    rows = (keys, keys, values)
    qkv = Packed(
        f"{name}.linear_attn.in_proj_qkv.{{kind}}",
        tuple(f"{name}.linear_attn.in_proj_{part}.{{kind}}" for part in "qkv"),
        lambda full, kind: split_outputs(full, kind, rows, lambda matrix: split_rows(matrix, rows, "q, k and v")),
    )
    return decoder_names(
        layer_rules,
        config.tie_embeddings,
        prefix,
        aliases=tuple((f"{other}.{module}.", f"{prefix}.{module}.") for module in _TEXT_MODULES),
        ignored=("mtp.*", "model.visual.*"),
        packed=(qkv, *packed_experts(config, name)),
    )


FAMILY = ModelFamily(read_config, HybridForCausalLM, weight_names)
