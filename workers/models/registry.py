"""Which architectures can be a target, and which file knows them. Adding one: docs/add-a-model.md."""

from importlib import import_module
from typing import Any, cast

from workers.models.family import ModelFamily

Family = ModelFamily[Any]  # of its own configuration

# By config.json's "architectures": the module in this folder that has its FAMILY, imported when it is asked for.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "llama",
    "Qwen3ForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "qwen.qwen3_moe",
    "Qwen3NextForCausalLM": "qwen.qwen3_next",
    "Qwen3_5ForConditionalGeneration": "qwen.qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen.qwen3_5",
    "Qwen3_5ForCausalLM": "qwen.qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen.qwen3_5",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "GptOssForCausalLM": "gpt_oss",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "Gemma3ForConditionalGeneration": "gemma",
    "Glm4MoeForCausalLM": "glm.glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm.glm4_moe_lite",
}


_ADAPTER = "workers.models.adapter"  # serves what transformers knows and no file of this folder does


def family_of(architecture: str, source: str) -> Family:
    """Raises ValueError that lists what there is for any other; `source` names the model in it."""
    if architecture in ARCHITECTURES:
        return cast(Family, import_module(f"workers.models.{ARCHITECTURES[architecture]}").FAMILY)
    if import_module(f"{_ADAPTER}.config").is_known(architecture):
        return cast(Family, import_module(f"{_ADAPTER}.family").FAMILY)
    raise ValueError(
        f"{source}: architecture {architecture or 'none'} is not supported as a target; supported are "
        f"{', '.join(ARCHITECTURES)}, and the decoders of transformers, which has none of this name"
    )
