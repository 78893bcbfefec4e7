"""Checks that contracts of several operations share (`attention.ops.operation`)."""

import torch
from torch import Tensor


def check_slots(slots: Tensor) -> None:
    """Assert that slots are [B] int64, contiguous: kernels read the slot of request b at address b."""
    assert slots.dim() == 1 and slots.dtype == torch.int64 and slots.is_contiguous(), "slots: [B] int64, contiguous"
