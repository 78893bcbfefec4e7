"""adapter_config.json as peft writes it (https://huggingface.co/docs/peft/package_reference/lora). Imports no torch."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MODULE_PREFIX = "base_model.model."  # of peft's names of tensors
DRAFT_FOLDER = "draft"  # of the adapter's folder
MERGE = "merge it into its base (peft's merge_and_unload), and serve that"
# Fields of configurations that change what a layer computes, beyond B A x; values that do not are false or empty.
_REFUSED = {
    "use_dora": "DoRA is not served",
    "lora_bias": "biases of adapters are not served",
    "modules_to_save": "whole modules in adapters are not served",
    "trainable_token_indices": "trained embeddings of tokens are not served",
    "target_parameters": "adapters of parameters, such as experts, are not served",
    "layer_replication": "replicated layers are not served",
    "alora_invocation_tokens": "activated LoRA is not served",
    "use_qalora": "QA-LoRA is not served",
    "use_bdlora": "block-diagonal LoRA is not served",
    "arrow_config": "Arrow's routing is not served",
    "kasa_config": "KaSA is not served",
    "monteclora_config": "MonteCLoRA is not served",
}
# Initialisations that replace the base's weights, so that the adapter does not fit the published base.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks and scales of an adapter's matrices.

    rank, alpha: of modules that no pattern names.
    rank_pattern, alpha_pattern: by regular expressions of the ends of module names; the first that matches counts.
    uses_rslora: divide alpha by the square root of the rank (arXiv 2312.03732).
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    uses_rslora: bool = False

    @property
    def max_rank(self) -> int:
        """The largest rank of any module."""
        return max(self.rank, *self.rank_pattern.values(), 1)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's matrices. module: its name in the base model."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of B A x."""
        rank = self.rank_of(module)
        return _by_pattern(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.uses_rslora else rank)


def _by_pattern(patterns: Mapping[str, T], module: str, default: T) -> T:
    found = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, default)


def draft_folder(folder: str | Path) -> Path | None:
    """Return the folder of the adapter of the draft that belongs to the target's adapter in `folder`; None without
    one."""
    found = Path(folder) / DRAFT_FOLDER
    return found if (found / CONFIG_FILE).is_file() else None


def read_adapter_config(folder: str | Path) -> AdapterConfig:
    """Read and check an adapter's configuration. Raises ValueError that names folder, field and remedy."""
    path = Path(folder) / CONFIG_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); an adapter's folder has this file") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must be an object")
    if (kind := raw.get("peft_type")) != "LORA":
        raise ValueError(f"{path}: peft_type={kind}: only LORA is served; {MERGE}")
    for name, reason in _REFUSED.items():
        if raw.get(name):
            raise ValueError(f"{path}: {name}={str(raw[name])[:80]}: {reason}; {MERGE}")
    if raw.get("bias", "none") != "none":
        raise ValueError(f"{path}: bias={raw['bias']}: trained biases are not served; {MERGE}")
    start = str(raw.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGES_BASE):
        raise ValueError(
            f"{path}: init_lora_weights={raw['init_lora_weights']}: was trained on a changed base; save it with peft's "
            "path_initial_model_for_weight_conversion"
        )
    return _checked(raw, path)


def _checked(raw: Mapping[str, Any], path: Path) -> AdapterConfig:
    """Return the configuration with checked numbers and patterns. Raises ValueError."""
    rank_pattern, alpha_pattern = raw.get("rank_pattern") or {}, raw.get("alpha_pattern") or {}
    ranks = {"r": raw.get("r", 8), **rank_pattern}
    alphas = {"lora_alpha": raw.get("lora_alpha", 8), **alpha_pattern}
    for name, rank in ranks.items():
        if type(rank) is not int or rank < 1:
            raise ValueError(f"{path}: {name}={rank}: a rank must be an integer of at least 1")
    for name, alpha in alphas.items():
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            raise ValueError(f"{path}: {name}={alpha}: must be a number")
    for pattern in (*rank_pattern, *alpha_pattern):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{path}: pattern {pattern!r} is no regular expression ({error})") from None
    return AdapterConfig(ranks["r"], alphas["lora_alpha"], rank_pattern, alpha_pattern, bool(raw.get("use_rslora")))
