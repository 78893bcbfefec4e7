"""Text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3. M-RoPE has three positions per token. Without
images they are equal, so it is RoPE."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workers.models import llama
from workers.models.config import text_part
from workers.models.config_fields import architecture_of
from workers.models.family import ModelFamily
from workers.models.llama import LlamaConfig, LlamaForCausalLM, text_weight_names
from workers.models.name_map import NameMap

_ROPE = ("rope_parameters", "rope_scaling")


def read_config(config: dict[str, Any], source: str) -> LlamaConfig:
    """Read the text_config of a model of images and text; older models have its fields at the top level. Raises
    ValueError for settings that are not supported."""
    text = text_part(config, source)
    architecture = architecture_of(text)
    generation = "Qwen3" if architecture.startswith("Qwen3") else "Qwen2"
    dense = llama.read_config(with_rope(text) | {"architectures": [f"{generation}ForCausalLM"]}, source)
    return replace(dense, architecture=architecture)


def is_served(config: Mapping[str, Any]) -> bool:
    """See `workers.models.llama.is_served`."""
    text = config.get("text_config")
    return llama.is_served(with_rope(text if isinstance(text, dict) else config))


def weight_names(config: LlamaConfig) -> NameMap:
    names = text_weight_names(config)
    return replace(names, ignored=(*names.ignored, "visual.*", "model.visual.*"))


def with_rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with RoPE in place of M-RoPE, which older files list as a kind of RoPE."""
    changed = dict(text)
    for key in _ROPE:
        scaling = text.get(key)
        if isinstance(scaling, dict) and "mrope" in (scaling.get("rope_type"), scaling.get("type")):
            kept = {name: value for name, value in scaling.items() if name != "type"}
            changed[key] = kept | {"rope_type": "default"}
    return changed


FAMILY = ModelFamily(read_config, LlamaForCausalLM, weight_names, is_served)
