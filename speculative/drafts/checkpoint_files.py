"""Reads the tensors of a draft's checkpoint. Unlike a target's, it may be a pickle: SafeAILab publishes heads as
`pytorch_model.bin`."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from aerie.kernels.capability import Capability
from aerie.workers.models.gguf.tensors import is_gguf_folder
from aerie.workers.models.weights import INDEX, CheckpointTensor, checkpoint_files, checkpoint_tensors, opened

_PICKLE = "pytorch_model.bin"
_CPU = torch.device("cpu")


def has_weights(folder: str | Path) -> bool:
    """Whether the folder has weights in any format, or an index of them."""
    folder = Path(folder)
    is_saved = (folder / INDEX).exists() or (folder / _PICKLE).exists() or any(folder.glob("*.safetensors"))
    return is_saved or is_gguf_folder(folder)


def draft_tensors(folder: str | Path, device: torch.device = _CPU) -> Iterator[CheckpointTensor]:
    """Yield every tensor, from safetensors files or else from `pytorch_model.bin`, where only tensors are unpickled.

    device: as in `checkpoint_tensors`.
    Raises ValueError, naming the file, if there is neither or one is damaged.
    """
    if not _has_pickle_alone(folder):
        yield from checkpoint_tensors(folder, device)
        return
    for name, tensor in _unpickled(folder).items():
        is_header = not Capability.of(device).has_memory and (tensor.dtype.is_floating_point or tensor.dim() > 1)
        yield CheckpointTensor(name, tensor.to(device) if is_header else tensor, _PICKLE)


def tensor_names(folder: str | Path) -> list[str]:
    """Return the names of all tensors; empty without weights, as with dummy ones."""
    if _has_pickle_alone(folder):
        return list(_unpickled(folder))
    if not any(Path(folder).glob("*.safetensors")):
        return []
    names: list[str] = []
    for path in checkpoint_files(folder):
        with opened(path, torch.device("meta")) as file:
            names += file.keys()
    return names


def missing_tables(folder: str | Path) -> tuple[str, ...]:
    """Return which of "embed_tokens" and "lm_head" the checkpoint lacks, and thus shares with the target; none without
    weights."""
    parts = {part for name in tensor_names(folder) for part in name.split(".")}
    return tuple(name for name in ("embed_tokens", "lm_head") if parts and name not in parts)


def _has_pickle_alone(folder: str | Path) -> bool:
    return (Path(folder) / _PICKLE).exists() and not any(Path(folder).glob("*.safetensors"))


def _unpickled(folder: str | Path) -> dict[str, Tensor]:
    """Return the tensors of pytorch_model.bin. Raises ValueError."""
    path = Path(folder) / _PICKLE
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before torch 1.6 are not archives and cannot be mapped
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise any exception
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: cannot be read ({reason}): it is cut off or damaged; download it again") from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{path}: is no dictionary of tensors; convert the checkpoint to safetensors")
    return loaded
