"""Resolves a rank's device and dtype from the configuration, and protects captures on a GPU."""

import contextlib
import gc
from collections.abc import Iterator

import torch

from aerie.kernels.capability import Capability


def resolve_device(device: str, rank: int) -> torch.device:
    """Return the device; "auto" is this process's GPU if it has one, else the CPU. A process that sees several GPUs
    uses number `rank`."""
    num_gpus = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and not num_gpus):
        return torch.device("cpu")
    if not num_gpus:
        raise ValueError("device=cuda: this process sees no GPU; set device: cpu, or check CUDA_VISIBLE_DEVICES")
    return torch.device("cuda", rank % num_gpus)


def make_current(device: torch.device) -> None:
    """Make a GPU this process's current device."""
    if device.index is not None:
        torch.cuda.set_device(device)


def resolve_dtype(dtype: str, checkpoint: torch.dtype, device: Capability) -> torch.dtype:
    """Return the dtype; "auto" is the checkpoint's on a GPU, and float32 on a CPU, where 16-bit dtypes are slow."""
    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    return torch.float32 if device.shares_host_memory else checkpoint


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off. It might free graphs of a previous engine, which would break the current capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
