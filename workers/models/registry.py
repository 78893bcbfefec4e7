"""Which architectures can be a target, and which file knows them. Adding one: docs/add-a-model.md."""

from collections.abc import Callable
from typing import Any

from workers.models.family import ModelFamily

Family = ModelFamily[Any]  # of its own configuration


def _llama() -> Family:
    from workers.models.llama import FAMILY

    return FAMILY


def _qwen3_moe() -> Family:
    from workers.models.qwen3_moe import FAMILY

    return FAMILY


def _qwen3_next() -> Family:
    from workers.models.qwen3_next import FAMILY

    return FAMILY


def _qwen3_5() -> Family:
    from workers.models.qwen3_5 import FAMILY

    return FAMILY


def _deepseek() -> Family:
    from workers.models.deepseek import FAMILY

    return FAMILY


# By config.json's "architectures"; a row imports its file when it is asked for.
ARCHITECTURES: dict[str, Callable[[], Family]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _llama,
    "Qwen3ForCausalLM": _llama,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
}


def family_of(architecture: str, source: str) -> Family:
    """Raises ValueError that lists what there is for any other; `source` names the model in it."""
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{source}: architecture {architecture or 'none'} is not supported as a target; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[architecture]()
