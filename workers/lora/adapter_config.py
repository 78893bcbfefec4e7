"""adapter_config.json as peft writes it (https://huggingface.co/docs/peft/package_reference/lora). Imports no torch."""

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MODULE_PREFIX = "base_model.model."  # of peft's names of tensors
DRAFT_FOLDER = "draft"  # of the adapter's folder
NEW_EMBEDDINGS = ("new_embeddings.safetensors", "new_embeddings.bin")  # that vLLM reads beside an adapter
MERGE = "merge it into its base (peft's merge_and_unload), and serve that"
# Fields of configurations that change what a layer computes, beyond B A x; values that do not are false or empty.
_REFUSED = {
    "use_dora": "DoRA is not served",
    "lora_bias": "biases of adapters are not served",
    "modules_to_save": "whole modules in adapters are not served, but matrices of lm_head and embed_tokens are "
    "(target_modules in training)",
    "trainable_token_indices": "trained embeddings of tokens are not served",
    "layer_replication": "replicated layers are not served",
    "alora_invocation_tokens": "activated LoRA is not served",
    "use_qalora": "QA-LoRA is not served",
    "use_bdlora": "block-diagonal LoRA is not served",
    "arrow_config": "Arrow's routing is not served",
    "kasa_config": "KaSA is not served",
    "monteclora_config": "MonteCLoRA is not served",
}
# Initialisations that replace the base's weights, so that the adapter does not fit the published base. peft converts
# the first ones (0.21, `save_pretrained`).
_CONVERTED = ("pissa", "olora", "corda", "lora_ga")
_CHANGES_BASE = (*_CONVERTED, "loftq")
# Fields of peft 0.2 to 0.21 that change nothing beyond the matrices in the file.
_KNOWN = frozenset(
    (
        *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora"),
        *(
            "target_modules",
            "target_parameters",
            "exclude_modules",
            "layers_to_transform",
            "layers_pattern",
            "bias",
            "init_lora_weights",
        ),
        *("fan_in_fan_out", "enable_lora", "merge_weights", "megatron_config", "megatron_core", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "ensure_weight_tying"),
        "qalora_group_size",
    )
)
logger = logging.getLogger(__name__)

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks and scales of an adapter's matrices.

    rank, alpha: rank and alpha of modules that no pattern names.
    rank_pattern, alpha_pattern: by regular expressions of the ends of module names; the first that matches counts.
    uses_rslora: divide alpha by the square root of the rank (arXiv 2312.03732).
    peft_version: of peft that saved it, such as (0, 19, 1); () if older than 0.18.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    uses_rslora: bool = False
    peft_version: tuple[int, ...] = ()

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
    """Read and check an adapter's configuration. Raises ValueError that names folder, field and remedy. Logs the names
    of fields that are not known."""
    path = Path(folder) / CONFIG_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); an adapter's folder has this file") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must be an object")
    _check_kind(raw, path)
    for name, reason in _REFUSED.items():
        if raw.get(name):
            raise ValueError(f"{path}: {name}={str(raw[name])[:80]}: {reason}; {MERGE}")
    if raw.get("bias", "none") != "none":
        raise ValueError(f"{path}: bias={raw['bias']}: trained biases are not served; {MERGE}")
    start = str(raw.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGES_BASE):
        remedy = (
            "save it with peft's path_initial_model_for_weight_conversion" if start.startswith(_CONVERTED) else MERGE
        )
        raise ValueError(
            f"{path}: init_lora_weights={raw['init_lora_weights']}: was trained on a changed base; {remedy}"
        )
    for name in NEW_EMBEDDINGS:
        if (path.parent / name).exists():
            raise ValueError(f"{path.parent / name}: embeddings of new tokens are not served; {MERGE}")
    if unknown := sorted(name for name, value in raw.items() if value and name not in _KNOWN):
        logger.warning("%s: fields %s are not known here, and have no effect", path, ", ".join(unknown))
    return _checked(raw, path)


def _check_kind(raw: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError for an adapter that is not peft's LoRA."""
    if "fine_tune_type" in raw:
        raise ValueError(f"{path}: is an adapter of MLX; merge it into its base (mlx_lm.fuse), and serve that")
    if (kind := raw.get("peft_type")) == "LORA":
        return
    remedy = f"add peft_type: LORA if peft's names and forms are meant, or {MERGE}" if kind is None else MERGE
    raise ValueError(f"{path}: peft_type={kind}: only LORA is served; {remedy}")


def _checked(raw: Mapping[str, Any], path: Path) -> AdapterConfig:
    """Return the configuration with checked numbers and patterns. Raises ValueError."""
    rank_pattern, alpha_pattern = (_pattern(raw, name, path) for name in ("rank_pattern", "alpha_pattern"))
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
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(raw.get("peft_version", "")))
    version = () if found is None else tuple(map(int, found.groups()))
    rslora = bool(raw.get("use_rslora"))
    return AdapterConfig(ranks["r"], alphas["lora_alpha"], rank_pattern, alpha_pattern, rslora, version)


def _pattern(raw: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    found = raw.get(name) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{path}: {name}={str(found)[:80]}: must be an object of names or regular expressions")
    return found
