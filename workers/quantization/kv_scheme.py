"""The KV cache scheme of a checkpoint, and the dtype that an engine uses."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aerie.attention.config import FP8_E4M3
from aerie.kernels.kv.stored_values import FP8

# Required values of quantization_config.kv_cache_scheme (compressed-tensors; ModelOpt's has fewer keys).
_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_ALGORITHMS = {"FP8": FP8_E4M3}  # ModelOpt's kv_cache_quant_algo
_MODELOPT_FILE = "hf_quant_config.json"


def read_kv_scheme(folder: str | Path, config: Mapping[str, Any]) -> str | None:
    """Return the `cache.dtype` of a checkpoint: FP8_E4M3; None if it does not mention KV; or its own text for an
    unsupported scheme.

    folder: the checkpoint's folder.
    config: its config.json.
    """
    quantization = config.get("quantization_config")
    sections = [quantization, _modelopt_file(folder)]
    sections += [section.get("quantization") for section in sections if isinstance(section, Mapping)]
    for section in sections:
        if not isinstance(section, Mapping):
            continue
        scheme, algorithm = section.get("kv_cache_scheme"), section.get("kv_cache_quant_algo")
        if isinstance(scheme, Mapping):
            wrong = {key: scheme[key] for key, only in _SCHEME.items() if key in scheme and scheme[key] != only}
            return f"kv_cache_scheme with {wrong}" if wrong else FP8_E4M3
        if scheme or algorithm:
            return _ALGORITHMS.get(str(algorithm), f"kv_cache_quant_algo={algorithm or scheme!r}")
    return None


def kv_dtype(setting: str, scheme: str | None, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of KV.

    setting: `cache.dtype`.
    scheme: from `read_kv_scheme`.
    dtype: the model's dtype.
    Raises ValueError if the checkpoint's scheme is not supported and `setting` is `auto`.
    """
    if setting == "auto" and scheme not in (None, FP8_E4M3):
        raise ValueError(
            f"cache.dtype=auto: the checkpoint's {scheme} is not supported; set cache.dtype: {FP8_E4M3}, or model"
        )
    return FP8 if FP8_E4M3 in (setting, scheme if setting == "auto" else None) else dtype


def _modelopt_file(folder: str | Path) -> object:
    """Read ModelOpt's own file, which has the KV scheme that config.json of older exports lacks."""
    try:
        return json.loads((Path(folder) / _MODELOPT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
