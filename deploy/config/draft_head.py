"""Detects the method of a published head, and the chain length of a block draft. Used by `deploy.config.model`; reads
config.json, without torch. `speculative.drafts` checks the head when the configuration is read."""

import json
from pathlib import Path
from typing import Any

from cluster.config import ConfigError


def draft_method(folder: Path) -> str:
    """Return `speculative.method` of the head in `folder`. Raises ConfigError for a config.json that cannot be read."""
    config = _config(folder)
    name = _name(config)
    if "dspark" in name:  # also DeepSpec's name for its DFlash heads
        return "dflash" if config.get("markov_rank") == 0 else "dspark"
    if "dflash" in name:
        return "dflash2" if "dflash2" in name else "dflash"
    if "gemma4" in name and "assistant" in name:
        return "mtp"
    # EAGLE-3's heads are recognised by architecture or by their own vocabulary
    return "eagle3" if "eagle3" in name or "draft_vocab_size" in config else "eagle"


def block_shape(folder: Path) -> dict[str, Any]:
    """Return the chain of a block draft's full block, an upper limit; empty for other heads."""
    config = _config(folder)
    name = _name(config)
    if "dflash" not in name and "dspark" not in name:
        return {}
    given = dict(config)
    for section in (config.get(key) for key in ("dflash_config", "dspark_config")):
        given |= section if isinstance(section, dict) else {}
    in_speculators = "speculators_model_type" in config
    size = given.get("block_size") or (8 if in_speculators else 16)
    kind = str(config.get("speculators_model_type") or name)
    from_anchor = given.get("sample_from_anchor", "dspark" in kind)
    depth = int(size) - (not from_anchor)
    return {"num_steps": depth, "num_draft_tokens": depth + 1}


def _name(config: dict[str, Any]) -> str:
    architectures = config.get("architectures") or []
    return " ".join([*architectures, str(config.get("speculators_model_type") or "")]).lower()


def _config(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--draft {folder}: its config.json cannot be read ({error}); download it again") from None
    return found
