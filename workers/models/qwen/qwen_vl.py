"""Text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3, dense or with experts. Their images are
`aerie.workers.vision`'s. M-RoPE has three positions per token. Without images they are equal, so it is RoPE."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aerie.workers.models import llama
from aerie.workers.models.config import text_part, with_mrope
from aerie.workers.models.config_fields import architecture_of
from aerie.workers.models.moe import LlamaMoeConfig, LlamaMoeForCausalLM, outputs_first, stacked_experts
from aerie.workers.models.name_map import NameMap, text_part_names
from aerie.workers.models.qwen import qwen3_moe
from aerie.workers.models.registry import ModelFamily

_ROPE = ("rope_parameters", "rope_scaling")
_EXPERTS = "model.layers.{layer}.mlp.experts"


def _has_experts(architecture: str) -> bool:
    return architecture.startswith("Qwen3VLMoe")


def read_config(config: dict[str, Any], source: str) -> LlamaMoeConfig:
    """Read the text_config of a model of images and text; older models have its fields at the top level. Routers always
    normalise. Raises ValueError for settings that are not supported."""
    text = text_part(config, source)
    architecture = architecture_of(text)
    text = _as_decoder(text, architecture) | {"norm_topk_prob": True}
    if _has_experts(architecture):
        model = qwen3_moe.read_config(text, source)
    else:
        model = LlamaMoeConfig(**vars(llama.read_config(text, source)), experts=None)
    return replace(model, architecture=architecture)


def is_served(config: Mapping[str, Any]) -> bool:
    """Return whether the text part is served: as the text-only model of its generation (`llama`, `qwen3_moe`)."""
    text = config.get("text_config")
    architecture = architecture_of(config)
    text = _as_decoder(text if isinstance(text, dict) else config, architecture)
    return qwen3_moe.is_served(text) if _has_experts(architecture) else llama.is_served(text)


def weight_names(config: LlamaMoeConfig) -> NameMap:
    """Return the names in Hugging Face's checkpoints. Experts of 16 bits are stacked: gate and up projections [experts,
    hidden_size, 2 * width], down projections [experts, width, hidden_size]; transformers 5 saves them with outputs
    first."""
    experts, hidden = config.experts, config.hidden_size
    if experts is None:
        return text_part_names(llama.weight_names(config))
    gate_up, down = stacked_experts(_EXPERTS, experts.routing.num_experts)
    packed = (outputs_first(gate_up, 2 * experts.width, hidden), outputs_first(down, hidden, experts.width))
    return replace(text_part_names(qwen3_moe.weight_names(config)), packed=packed)


def _as_decoder(text: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the fields as the text-only model of this generation has them: RoPE, and its defaults for windows."""
    if architecture.startswith("Qwen3"):  # without windows
        own = {"architectures": [f"Qwen3{'Moe' * _has_experts(architecture)}ForCausalLM"], "use_sliding_window": False}
    else:
        own = {"architectures": ["Qwen2ForCausalLM"]}
    fields = {"max_window_layers": 80} | _with_default_rope(text) | own
    if architecture.startswith("Qwen3"):
        return with_mrope(fields, (24, 20, 20), interleaved=True)
    return with_mrope(fields, (16, 24, 24), interleaved=False)


def _with_default_rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with rope_type "default" in place of "mrope". Older files name M-RoPE as a type; newer ones add
    its sections to the default type."""
    changed = dict(text)
    for key in _ROPE:
        scaling = text.get(key)
        if isinstance(scaling, dict) and "mrope" in (scaling.get("rope_type"), scaling.get("type")):
            fields = {name: value for name, value in scaling.items() if name != "type"}
            changed[key] = fields | {"rope_type": "default"}
    return changed


FAMILY = ModelFamily(read_config, LlamaMoeForCausalLM, weight_names, is_served)
