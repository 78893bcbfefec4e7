"""The draft inside a model's checkpoint: its MTP module, and the tree to draft with it. Used by
`deploy.config.model`; reads config.json and the names of tensors, without torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

_TREE = {"num_steps": 4, "top_k": 4, "num_draft_tokens": 8}
_CHAIN = {"num_steps": 3, "top_k": 1, "num_draft_tokens": 4}
# Architectures whose modules are served (`speculative.drafts`), with the number of modules if config.json has none.
_MODULES = {
    "DeepseekV3ForCausalLM": 0,
    "Glm4MoeForCausalLM": 0,
    "Glm4MoeLiteForCausalLM": 0,
    "Qwen3_5ForConditionalGeneration": 0,
    "Qwen3_5MoeForConditionalGeneration": 0,
    "Qwen3_5ForCausalLM": 0,
    "Qwen3_5MoeForCausalLM": 0,
    "Qwen3NextForCausalLM": 1,
}


def own_draft(folder: Path) -> dict[str, Any] | None:
    """Return the section `speculative` for the model in `folder`; None if it has no module.

    The shape is an upper limit (`speculative.adaptive`): a tree if verified rows are cheap, and a chain for mixtures of
    experts, where each row reads other experts.
    """
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config: Mapping[str, Any] = {**raw, **(raw.get("text_config") or {})}
        architecture = (raw.get("architectures") or [""])[0]
        numbers = (config.get(key) for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"))
        number = next((each for each in numbers if each is not None), _MODULES.get(architecture, 0))
        if architecture not in _MODULES or not int(number) or not _has_tensors(folder, config):
            return None
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError):
        return None  # the check of the configuration reports the folder's fault
    has_experts = any(config.get(key) for key in ("num_experts", "n_routed_experts"))
    return {"method": "mtp", **(_CHAIN if has_experts else _TREE)}


def _has_tensors(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint has the module's tensors, which some copies leave out; True if it has no weights yet."""
    first = (f"model.layers.{config.get('num_hidden_layers')}.", "mtp.")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return any(name.startswith(first) for name in json.loads(index.read_text())["weight_map"])
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="np") as opened:
            if any(name.startswith(first) for name in opened.keys()):  # noqa: SIM118 - no mapping
                return True
    return not files
