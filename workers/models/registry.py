"""The table of architectures with a class of their own (docs/add-a-model.md); all others go to the adapter."""

from importlib import import_module
from typing import Any, cast

from workers.config import Implementation
from workers.models.config import ModelConfig
from workers.models.config_fields import architecture_of
from workers.models.family import ModelFamily

Family = ModelFamily[Any]  # generic in its configuration

# Key: config.json's "architectures". Value: the module in this folder with its FAMILY, imported on use.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Llama4ForCausalLM": "llama4.model",
    "Llama4ForConditionalGeneration": "llama4.model",
    "Qwen2ForCausalLM": "llama",
    "Qwen3ForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "qwen.qwen3_moe",
    "Qwen3NextForCausalLM": "qwen.qwen3_next",
    "Qwen3_5ForConditionalGeneration": "qwen.qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen.qwen3_5",
    "Qwen3_5ForCausalLM": "qwen.qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen.qwen3_5",
    "Qwen2VLForConditionalGeneration": "qwen.qwen_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen.qwen_vl",
    "Qwen3VLForConditionalGeneration": "qwen.qwen_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen.qwen_vl_moe",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo",
    "Olmo3ForCausalLM": "olmo",
    "GraniteForCausalLM": "granite.model",
    "GraniteMoeForCausalLM": "granite.model",
    "GraniteMoeSharedForCausalLM": "granite.model",
    "GraniteMoeHybridForCausalLM": "granite.model",
    "Qwen2MoeForCausalLM": "qwen.qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    "Gemma2ForCausalLM": "gemma.gemma3",
    "Gemma3ForCausalLM": "gemma.gemma3",
    "Gemma3ForConditionalGeneration": "gemma.gemma3",
    "Gemma4ForCausalLM": "gemma.gemma4",
    "Gemma4ForConditionalGeneration": "gemma.gemma4",
    "Gemma4UnifiedForCausalLM": "gemma.gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma.gemma4",
    "Glm4MoeForCausalLM": "glm.glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm.glm4_moe_lite",
}


_ADAPTER = "workers.models.adapter"  # serves the other decoders of transformers


def family_for(config: dict[str, Any], source: str, implementation: Implementation = "auto") -> Family:
    """Return the family that reads a config.json; see `family_of`. implementation: see `ModelSource`."""
    family = family_of(architecture_of(config), source)
    return family if implementation == "auto" and family.serves(config) else _adapter()


def family_of_config(config: ModelConfig, source: str) -> Family:
    """Return the family that has read `config`; see `family_of`."""
    return family_of(config.architecture, source) if config.served_by is None else _adapter()


def _adapter() -> Family:
    return cast(Family, import_module(f"{_ADAPTER}.family").FAMILY)


def family_of(architecture: str, source: str) -> Family:
    """Return the family of an architecture. Raises ValueError, with the supported ones, for an unknown architecture.
    source: name of the model in errors."""
    if architecture in ARCHITECTURES:
        return cast(Family, import_module(f"workers.models.{ARCHITECTURES[architecture]}").FAMILY)
    if import_module(f"{_ADAPTER}.config").is_known(architecture):
        return _adapter()
    raise ValueError(
        f"{source}: architecture {architecture or 'none'} is not supported as a target; supported are "
        f"{', '.join(ARCHITECTURES)}, and the decoders of transformers, which has none of this name"
    )
