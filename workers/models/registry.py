"""`ModelFamily`, what a file of this folder declares about the architectures that it serves; the table of these
architectures (docs/add-a-model.md), all others go to the adapter; and the table of those with MTP modules. Imported
without torch, which a command line that chooses a draft does not need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from aerie.workers.config import Implementation
from aerie.workers.models.config_fields import MAX_LAYERS, architecture_of, section_of, size_of

if TYPE_CHECKING:
    import torch

    from aerie.workers.distributed.tp_group import TPGroup
    from aerie.workers.models.config import ModelConfig
    from aerie.workers.models.decoder import TargetModel
    from aerie.workers.models.name_map import NameMap

ConfigT = TypeVar("ConfigT", bound="ModelConfig")


def _all(config: Mapping[str, Any]) -> bool:
    return True


@dataclass(frozen=True)
class ModelFamily(Generic[ConfigT]):
    """The functions by which a model family is served.

    read_config: (config.json, name of the checkpoint for errors) -> configuration. Raises ValueError for unsupported
        settings.
    model: (configuration, ranks, rows of the rotary table, its device, layers to capture) -> this rank's module.
    weight_names: the checkpoint's names of the model's tensors.
    serves: whether this family serves a config.json of its architectures; the adapter gets the others.
    """

    read_config: Callable[[dict[str, Any], str], ConfigT]
    model: Callable[[ConfigT, TPGroup, int, torch.device, tuple[int, ...]], TargetModel]
    weight_names: Callable[[ConfigT], NameMap]
    serves: Callable[[Mapping[str, Any]], bool] = _all


Family = ModelFamily[Any]  # generic in its configuration

# Key: config.json's "architectures". Value: the module in this folder with its FAMILY, imported on use.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
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
    "Qwen3VLMoeForConditionalGeneration": "qwen.qwen_vl",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo",
    "Olmo3ForCausalLM": "olmo",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite",
    "GraniteMoeSharedForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granite",
    "Qwen2MoeForCausalLM": "qwen.qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    "Gemma2ForCausalLM": "gemma.gemma3",
    "Gemma3ForCausalLM": "gemma.gemma3",
    "Gemma3ForConditionalGeneration": "gemma.gemma3",
    "Gemma4ForCausalLM": "gemma.gemma4",
    "Gemma4ForConditionalGeneration": "gemma.gemma4",
    "Gemma4UnifiedForCausalLM": "gemma.gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma.gemma4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "deepseek",
}


@dataclass(frozen=True)
class MtpModules:
    """The modules for multi-token prediction (MTP) in the checkpoints of an architecture. The families skip their
    tensors; `aerie.speculative.drafts.mtp` serves them, `aerie.speculative.training.mtp` trains them, and
    `aerie.deploy.config.drafts` finds them.

    count_key: config.json's field with their number.
    default_number: their number if the field is missing and the checkpoint has the tensors.
    after_layers: whether they are stored as layers after the last one, with names of layers; else as `mtp.*`.
    """

    count_key: str
    default_number: int = 0
    after_layers: bool = False

    def count(self, config: Mapping[str, Any], source: str) -> int | None:
        """Return their number; None if config.json, or its text_config, does not say. Raises ValueError."""
        text = {**config, **section_of(config, "text_config", source)}
        stated = text.get(self.count_key) is not None
        return size_of(text, self.count_key, source, min_value=0, max_value=MAX_LAYERS) if stated else None

    def names(self, num_layers: int, count: int) -> list[str]:
        """Return patterns of the names of the tensors of `count` modules after `num_layers` layers."""
        return [f"{self.prefix(num_layers + i)}*" for i in range(count)]

    def prefix(self, num_layers: int) -> str:
        """Return the start of the names of the first one's tensors. num_layers: of the model."""
        return f"model.layers.{num_layers}." if self.after_layers else "mtp."


AFTER_LAYERS = MtpModules("num_nextn_predict_layers", after_layers=True)
_QWEN3_5 = MtpModules("mtp_num_hidden_layers")

MTP_MODULES = {  # by architecture; the other ones of the registry have none that is served
    "DeepseekV3ForCausalLM": AFTER_LAYERS,
    "Glm4MoeForCausalLM": AFTER_LAYERS,
    "Glm4MoeLiteForCausalLM": AFTER_LAYERS,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5,
    "Qwen3NextForCausalLM": MtpModules("mtp_num_hidden_layers", default_number=1),
}


_ADAPTER = "aerie.workers.models.adapter"  # serves the other decoders of transformers


def family_for(config: dict[str, Any], source: str, implementation: Implementation = "auto") -> Family:
    """Return the family that reads a config.json; see `family_of`. implementation: see `ModelSource`."""
    family = family_of(architecture_of(config), source)
    return family if implementation == "auto" and family.serves(config) else _adapter()


def family_of_config(config: ModelConfig, source: str) -> Family:
    """Return the family that has read `config`; see `family_of`."""
    return family_of(config.architecture, source) if config.served_by is None else _adapter()


def _adapter() -> Family:
    return cast(Family, import_module(f"{_ADAPTER}.model").FAMILY)


def family_of(architecture: str, source: str) -> Family:
    """Return the family of an architecture. Raises ValueError, with the supported ones, for an unknown architecture.
    source: name of the model in errors."""
    if architecture in ARCHITECTURES:
        return cast(Family, import_module(f"aerie.workers.models.{ARCHITECTURES[architecture]}").FAMILY)
    if import_module(f"{_ADAPTER}.config").is_known(architecture):
        return _adapter()
    raise ValueError(
        f"{source}: architecture {architecture or 'none'} is not supported as a target; supported are "
        f"{', '.join(ARCHITECTURES)}, and the decoders of transformers, which has none of this name"
    )


def mtp_modules_of(config: Mapping[str, Any]) -> MtpModules | None:
    """Return where a checkpoint with this config.json has its modules; None for an architecture without."""
    return MTP_MODULES.get(architecture_of(config))
