"""The draft methods that exist, and the draft that a configuration names. Asked by `speculative.build`."""

from collections.abc import Mapping
from typing import Any

from speculative.drafts.config import draft_architecture
from speculative.drafts.eagle import Eagle
from speculative.drafts.eagle3 import Eagle3
from speculative.drafts.method import DraftMethod
from speculative.drafts.mtp import Mtp
from workers.models.config import ModelConfig, read_config_json

METHODS: dict[str, type[DraftMethod]] = {method.name: method for method in (Eagle, Eagle3, Mtp)}


def read_draft(name: str, draft_path: str, target_path: str, target: ModelConfig) -> DraftMethod:
    """The draft of method `name`, checked against its target. target_path: folder of the target's checkpoint.

    Raises ValueError that lists the methods if there is none of this name, and that names draft, target and remedy if
    the checkpoint is of another method or does not fit.
    """
    if name not in METHODS:
        raise ValueError(f"speculative.method={name}: does not exist; choose one of {', '.join(METHODS)}")
    method = METHODS[name]
    path = method.folder(draft_path, target_path)
    raw = read_config_json(path)
    if not method.recognises(raw):
        raise ValueError(_other_method(name, path, raw))
    return method.read(path, raw, target)


def _other_method(name: str, path: str, raw: Mapping[str, Any]) -> str:
    """Run as what it is not, a draft would load or nearly so, and then accept nothing and say nothing."""
    draft, architecture = f"speculative.method={name}: draft {path}", draft_architecture(raw)
    right = [other.name for other in METHODS.values() if other.recognises(raw)]
    if not right and "speculators_model_type" in raw:
        architecture = f"{architecture}, speculators_model_type {raw['speculators_model_type']}"
    if not right:
        return f"{draft} (architecture {architecture}) is of no method that exists; those are {', '.join(METHODS)}"
    return f"{draft} is an {right[0]} head (architecture {architecture}); set method: {right[0]}"
