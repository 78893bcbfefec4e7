"""Whether kernels may be launched before the one in front of them ends."""

from functools import cache

import torch


@cache
def launches_early(device: torch.device) -> bool:
    """Whether programmatic dependent launch exists: compute capability 9 (Hopper) or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
