"""Whether kernels may be launched before the one in front of them ends, and how they are."""

from functools import cache

import torch


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether programmatic dependent launch exists: compute capability 9 (Hopper) or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_wait(early: bool) -> dict[str, bool]:
    """Launch options of a kernel with a constant PDL; the option `launch_pdl` exists on GPUs only."""
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
