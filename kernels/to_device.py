"""Asynchronous copies from host memory to a device."""

import torch
from torch import Tensor

from aerie.kernels.capability import Capability


def pinned(host: Tensor, device: torch.device) -> Tensor:
    """Return `host` in pinned memory, for an asynchronous copy to `device`; returns `host` itself if `device` shares
    its memory."""
    return host.pin_memory() if Capability.of(device).has_streams else host


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy `host` to `device` through pinned memory, which torch's cache reuses only after the copy; returns `host`
    itself if `device` shares its memory."""
    return host.pin_memory().to(device, non_blocking=True) if Capability.of(device).has_streams else host
