"""The device and the type that a rank computes with, from what the configuration says."""

import torch

from attention.capability import Capability


def resolve_device(device: str, rank: int) -> torch.device:
    """ "auto" is this process's GPU if it has one, else the CPU. A worker sees one GPU; if it sees several, its rank
    chooses."""
    num_gpus = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and not num_gpus):
        return torch.device("cpu")
    if not num_gpus:
        raise ValueError("device=cuda: this process sees no GPU; set device: cpu, or check CUDA_VISIBLE_DEVICES")
    return torch.device("cuda", rank % num_gpus)


def make_current(device: torch.device) -> None:
    """Make a GPU the one that this process's kernels and streams are on."""
    if device.index is not None:
        torch.cuda.set_device(device)


def resolve_dtype(dtype: str, checkpoint: torch.dtype, device: Capability) -> torch.dtype:
    """ "auto" is the checkpoint's on a GPU and float32 on a CPU, where half types are slow."""
    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    return torch.float32 if device.shares_host_memory else checkpoint
