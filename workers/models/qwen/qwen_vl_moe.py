"""Text part of Qwen3-VL's mixtures of experts: Qwen3's. See `workers.models.qwen.qwen_vl` for its positions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workers.models.config import text_part
from workers.models.config_fields import architecture_of
from workers.models.family import ModelFamily
from workers.models.llama import text_weight_names
from workers.models.moe import outputs_first, stacked_experts
from workers.models.name_map import NameMap
from workers.models.qwen import qwen3_moe, qwen_vl
from workers.models.qwen.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

_EXPERTS = "model.layers.{layer}.mlp.experts"


def read_config(config: dict[str, Any], source: str) -> Qwen3MoeConfig:
    """Read the text_config of a model of images and text. Its routers always normalise."""
    text = qwen_vl.with_rope(text_part(config, source))
    named = {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
    return replace(qwen3_moe.read_config(text | named, source), architecture=architecture_of(text))


def is_served(config: Mapping[str, Any]) -> bool:
    """See `workers.models.qwen.qwen3_moe.is_served`."""
    return qwen3_moe.is_served(config.get("text_config") or config)


def weight_names(config: Qwen3MoeConfig) -> NameMap:
    """Return the names in checkpoints, which stack 16-bit experts: gate and up projections [experts, hidden_size, 2 *
    width], down projections [experts, width, hidden_size]; transformers 5 saves them with outputs first."""
    names, hidden, width = text_weight_names(config), config.hidden_size, config.expert_width
    gate_up, down = stacked_experts(_EXPERTS, config.routing.num_experts)
    moe = qwen3_moe.weight_names(config)
    return NameMap(
        moe.rules,
        aliases=names.aliases,
        ignored=(*moe.ignored, "visual.*", "model.visual.*"),
        packed=(outputs_first(gate_up, 2 * width, hidden), outputs_first(down, hidden, width)),
    )


FAMILY = ModelFamily(read_config, Qwen3MoeForCausalLM, weight_names, is_served)
