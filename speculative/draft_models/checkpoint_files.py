"""Tensors of a draft's checkpoint, which unlike a target's may be a pickle: SafeAILab publishes `pytorch_model.bin`."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from workers.models.weights import checkpoint_files, checkpoint_tensors

_PICKLE = "pytorch_model.bin"


def draft_tensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor on the CPU) of every tensor, from safetensors files or else from `pytorch_model.bin`, of which
    nothing but tensors is unpickled. Raises ValueError if there is neither."""
    if _has_pickle_alone(folder):
        yield from _unpickled(folder).items()
    else:
        yield from checkpoint_tensors(folder)


def tensor_names(folder: str | Path) -> list[str]:
    """Of every tensor of the checkpoint; empty if it has no weights, as with dummy ones."""
    if _has_pickle_alone(folder):
        return list(_unpickled(folder))
    if not any(Path(folder).glob("*.safetensors")):
        return []
    names: list[str] = []
    for path in checkpoint_files(folder):
        with safe_open(str(path), framework="pt", device="cpu") as file:
            names += file.keys()
    return names


def _has_pickle_alone(folder: str | Path) -> bool:
    return (Path(folder) / _PICKLE).exists() and not any(Path(folder).glob("*.safetensors"))


def _unpickled(folder: str | Path) -> dict[str, Tensor]:
    path = Path(folder) / _PICKLE
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # files of torch before 1.6 are no archives and cannot be mapped
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{path}: is no dictionary of tensors; convert the checkpoint to safetensors")
    return loaded
