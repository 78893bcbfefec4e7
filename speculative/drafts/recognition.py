"""The method of a draft's checkpoint, by its config.json. `aerie.deploy.config.drafts` sets `speculative.method` by it,
and `aerie.speculative.drafts.registry` refuses a draft whose method is another. Without torch."""

from collections.abc import Mapping
from typing import Any

from aerie.speculative.config import Method
from aerie.workers.models.config_fields import architecture_of
from aerie.workers.models.registry import mtp_modules_of

ASSISTANTS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")

# Unsupported block drafts, by a part of their architecture's or algorithm's name.
_REFUSED = {
    "dspine": "DSpine",
    "lilicorr": "LiLiCorr",
    "xpress": "XPress",
    "peagle": "P-EAGLE",
    "p_eagle": "P-EAGLE",
    "gemma4dspark": "DeepSpec (Gemma 4's layers)",
}


def draft_architecture(raw: Mapping[str, Any]) -> str:
    """Return the architecture. Some EAGLE heads name none; then it is Llama's."""
    return architecture_of(raw, "LlamaForCausalLM")


def method_of(raw: Mapping[str, Any]) -> Method | None:
    """Return the method of a draft with this config.json; None if it is of none. Raises ValueError for a known but
    unsupported draft.

    A checkpoint with an MTP module, or a module alone, has its target's config.json. One of an EAGLE head is that of a
    decoder of one layer, which need not mention EAGLE.
    """
    architecture, kind = draft_architecture(raw), raw.get("speculators_model_type")
    if (block := _block_method(raw)) is not None:
        return block
    if kind is not None:
        return "eagle3" if kind == "eagle3" else None
    if "eagle3" in architecture.lower() or "draft_vocab_size" in raw:
        return "eagle3"
    if architecture in ASSISTANTS or mtp_modules_of(raw) is not None:
        return "mtp"
    is_decoder = architecture.endswith("ForCausalLM") or "Eagle" in architecture
    return "eagle" if is_decoder and "Assistant" not in architecture else None


def _block_method(raw: Mapping[str, Any]) -> Method | None:
    """Return the method of a block draft; None if it is another kind. Raises ValueError for kinds that are not
    served."""
    name = str(raw.get("speculators_model_type") or draft_architecture(raw)).lower()
    nested = raw.get("dflash_config")
    projector = str(nested.get("projector_type") or "").lower() if isinstance(nested, dict) else ""
    for part, refused in _REFUSED.items():
        if part in name or part in projector:
            raise ValueError(
                f"draft (architecture {draft_architecture(raw)}) is a {refused} head, which is not served; use a "
                "DFlash head of the same target"
            )
    if "domino" in name or projector == "domino":
        return "domino"
    if "dspark" in name:
        # also DeepSpec's name for DFlash heads, which have no Markov head
        return "dflash" if raw.get("markov_rank") == 0 else "dspark"
    return "dflash2" if "dflash2" in name else "dflash" if "dflash" in name else None
