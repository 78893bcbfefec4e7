"""Copies from host memory to a device for which nothing waits."""

import torch
from torch import Tensor

from attention.capability import Capability


def pinned(host: Tensor, device: torch.device) -> Tensor:
    """`host` in pinned memory, from which `device` copies by itself; `host` itself where nothing is copied."""
    return host.pin_memory() if Capability.of(device).has_streams else host


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """`host` on `device`, through pinned memory, which torch's cache reuses only once the copy is done; `host` itself
    where nothing is copied."""
    return host.pin_memory().to(device, non_blocking=True) if Capability.of(device).has_streams else host
