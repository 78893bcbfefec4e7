"""All draft methods, and the draft that a configuration names. Used by `aerie.speculative.build`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aerie.speculative.drafts.blocks.dflash import DFlash
from aerie.speculative.drafts.blocks.dflash2 import DFlash2
from aerie.speculative.drafts.blocks.domino import Domino
from aerie.speculative.drafts.blocks.dspark import DSpark
from aerie.speculative.drafts.eagle import Eagle
from aerie.speculative.drafts.eagle3 import Eagle3
from aerie.speculative.drafts.gemma4_assistant import Gemma4Assistant
from aerie.speculative.drafts.method import DraftMethod
from aerie.speculative.drafts.mtp import DeepseekMtp, QwenMtp
from aerie.speculative.drafts.recognition import draft_architecture, method_of
from aerie.workers.layers.rotary import with_rope_scaling
from aerie.workers.models.config import ModelConfig, read_config_json
from aerie.workers.models.loading import fitted_quant

# By value of speculative.method; if one value has several methods, the one that recognises the checkpoint is used.
METHODS: dict[str, tuple[type[DraftMethod], ...]] = {
    "eagle": (Eagle,),
    "eagle3": (Eagle3,),
    "mtp": (DeepseekMtp, QwenMtp, Gemma4Assistant),
    "dflash": (DFlash,),
    "dspark": (DSpark,),
    "dflash2": (DFlash2,),
    "domino": (Domino,),
}


def read_draft(
    name: str,
    draft_path: str,
    target_path: str,
    target: ModelConfig,
    rope_scaling: Mapping[str, Any] | None = None,
) -> DraftMethod:
    """Read the draft of method `name`, and check it against its target.

    target_path: folder of the target's checkpoint.
    rope_scaling: see `ModelSource`; for a module of the target's own.
    Raises ValueError that lists the methods for an unknown name, or names draft, target and remedy if the checkpoint is
    of another method or does not fit.
    """
    if name not in METHODS:
        raise ValueError(f"speculative.method={name}: does not exist; choose one of {', '.join(METHODS)}")
    path = METHODS[name][0].folder(draft_path, target_path)
    raw = read_config_json(path)
    if path == target_path:
        raw = with_rope_scaling(raw, rope_scaling or {}, f"model {path}")
    for method in METHODS[name]:
        if method.recognises(raw):
            draft = method.read(path, raw, target)
            quant = fitted_quant(draft.model.quant, path, draft.weight_names)
            return replace(draft, model=replace(draft.model, quant=quant))
    if path == target_path:
        raise ValueError(
            f"speculative.method={name}: target {path} (architecture {draft_architecture(raw)}) has no module for "
            "drafting in its checkpoint; use another method, with a head of its own"
        )
    raise ValueError(_other_method(name, path, raw))


def _other_method(name: str, path: str, raw: Mapping[str, Any]) -> str:
    """Return the error for a draft of another method. Without the check such a draft might load, and the target would
    silently accept none of its tokens."""
    draft, architecture = f"speculative.method={name}: draft {path}", draft_architecture(raw)
    right = method_of(raw)
    if right is None and "speculators_model_type" in raw:
        architecture = f"{architecture}, speculators_model_type {raw['speculators_model_type']}"
    if right is None:
        return f"{draft} (architecture {architecture}) belongs to no known method; known are {', '.join(METHODS)}"
    article = "a" if right.startswith("d") else "an"
    return f"{draft} is {article} {right} head (architecture {architecture}); set method: {right}"
