"""A GGUF file's model as transformers' module, dequantised, for training drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from aerie.speculative.training import TrainingError
from aerie.workers.models.gguf.tensors import gguf_tensors


def gguf_target(
    folder: Path, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Return the tokenizer and the model of a folder that stands for a GGUF file
    (`aerie.workers.models.gguf.folder`), its weights dequantised to `dtype`. Raises `TrainingError` for an
    architecture that transformers lacks, and for missing tensors."""
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw.pop("quantization_config", None)
    kind = getattr(transformers, raw["architectures"][0], None)
    if kind is None:
        raise TrainingError(f"target={folder}: {raw['architectures'][0]} is unknown to transformers; use another model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    raw.setdefault("pad_token_id", tokenizer.pad_token_id)
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(raw))
    tensors = {name: tensor for name, tensor, _ in gguf_tensors(folder, torch.device("cpu"), dense=True)}
    tensors = {name: tensor.to(device, dtype).contiguous() for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    _fill_buffers(model, device)
    tied = set(model.all_tied_weights_keys) if raw.get("tie_word_embeddings") else set()
    if lacking := sorted(set(missing) - tied) or sorted(unexpected):
        raise TrainingError(f"target={folder}: transformers' module and the file differ in {lacking[0]}")
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.requires_grad_(False)
    return tokenizer, model.to(device).eval()


def _fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute what no checkpoint has, the frequencies of rotations: modules with such buffers are built anew."""
    for name, module in list(model.named_modules()):
        if next(module.buffers(recurse=False), None) is not None:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, type(module)(model.config).to(device))
