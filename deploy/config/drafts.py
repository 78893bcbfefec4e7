"""Detects how to draft: the method of a published head, the shape of a block draft, and the draft inside a model's own
checkpoint (MTP). Used by `aerie.deploy.config.model`; reads config.json and names of tensors, without torch.
`aerie.speculative.drafts` checks the draft when the configuration is read."""

import json
from pathlib import Path
from typing import Any, get_args

from safetensors import SafetensorError, safe_open

from aerie.cluster.config import ConfigError
from aerie.speculative.config import BLOCK_METHODS, Method
from aerie.speculative.drafts.recognition import draft_architecture, method_of
from aerie.speculative.tree_shape import max_nodes
from aerie.workers.models.registry import mtp_modules_of

# Limits of a block's tree
_TREE_CHILDREN = 7
_TREE_NODES = 63  # nodes of the default tree of dense models
_TREE_NODES_OF_EXPERTS = 32  # each verified row reads other experts
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def draft_method(folder: Path) -> str:
    """Return `speculative.method` of the draft in `folder`. Raises ConfigError for a config.json that cannot be read,
    or of no method."""
    config = _config(folder)
    try:
        method = method_of(config)
    except ValueError as error:
        raise ConfigError(f"--draft {folder}: {error}") from None
    if method is None:
        kind = config.get("speculators_model_type") or draft_architecture(config)
        raise ConfigError(
            f"--draft {folder}: a draft of the kind {kind} belongs to no known method; known are "
            f"{', '.join(get_args(Method))}"
        )
    return method


def block_tree_keys(folder: Path, target: Path) -> dict[str, Any]:
    """Return the keys of the section `speculative` that set the tree of a block draft; {} for other methods.

    The tree is as deep as the block. It is an upper limit (`speculative.adaptive`): the engine chooses among chains
    and narrower trees by load and text (`TreeShape.smaller`).

    folder, target: model folders of the draft and of the target.
    """
    config, method = _config(folder), draft_method(folder)
    if method not in BLOCK_METHODS:
        return {}
    fields = dict(config)
    for section in (config.get(key) for key in ("dflash_config", "dspark_config")):
        fields |= section if isinstance(section, dict) else {}
    in_speculators = "speculators_model_type" in config
    size = fields.get("block_size") or (8 if in_speculators else 16)
    kind = str(config.get("speculators_model_type") or draft_architecture(config)).lower()
    # The anchor is the block's first row, of the newest token. If it predicts nothing, the tree has a level less.
    from_anchor = fields.get("sample_from_anchor", fields.get("shift_label", "dspark" in kind))
    depth = int(size) - (not from_anchor)
    if depth < 2:
        return {"num_steps": depth, "num_draft_tokens": depth + 1}
    nodes = _TREE_NODES_OF_EXPERTS if _has_experts(target) else _TREE_NODES
    nodes = min(max(nodes, depth + 1), _TREE_NODES, max_nodes(depth, _TREE_CHILDREN, in_block=True))
    return {"num_steps": depth, "top_k": _TREE_CHILDREN, "num_draft_tokens": nodes}


def _has_experts(target: Path) -> bool:
    try:
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        return any({**config, **(config.get("text_config") or {})}.get(key) for key in _EXPERTS)
    except (OSError, ValueError, TypeError, AttributeError):
        return False  # the check of the configuration reports the target's fault


def _config(folder: Path) -> dict[str, Any]:
    """Return config.json of the draft in `folder`. Raises ConfigError."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--draft {folder}: its config.json cannot be read ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--draft {folder}: its config.json is no object; download it again")
    return content


_TREE = {"num_steps": 4, "top_k": 4, "num_draft_tokens": 8}
_CHAIN = {"num_steps": 3, "top_k": 1, "num_draft_tokens": 4}


def own_draft(folder: Path) -> dict[str, Any] | None:
    """Return the section `speculative` for the model in `folder`; None if it has no module.

    The shape is an upper limit (`speculative.adaptive`): a tree if verified rows are cheap, and a chain for mixtures of
    experts, where each row reads other experts.
    """
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        modules = mtp_modules_of(raw)
        if modules is None:
            return None
        count = modules.count(raw, str(folder))
        layers = int({"num_hidden_layers": 0, **raw, **(raw.get("text_config") or {})}["num_hidden_layers"])
        if not (modules.default_number if count is None else count) or not _has_tensors(folder, modules.prefix(layers)):
            return None
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError):
        return None  # the check of the configuration reports the folder's fault
    return {"method": "mtp", **(_CHAIN if _has_experts(folder) else _TREE)}


def _has_tensors(folder: Path, first: str) -> bool:
    """Whether the checkpoint has the module's tensors, whose names start with `first`, and which some copies leave out;
    True if it has no weights yet."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return any(name.startswith(first) for name in json.loads(index.read_text())["weight_map"])
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="np") as opened:
            if any(name.startswith(first) for name in opened.keys()):  # noqa: SIM118 - no mapping
                return True
    return not files
