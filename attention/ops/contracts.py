"""Contracts (`attention.ops.operation`): whether calls check them, and checks that several operations share."""

import torch
from torch import Tensor

checked = False
"""Whether every call checks its contract. Set by `check_every_call`."""


def check_every_call() -> None:
    """Check contracts at every call in this process from now on: in tests and in debug mode. Otherwise a rank on a CPU
    would spend some 5 % of its time on it."""
    global checked
    checked = True


def check_slots(slots: Tensor) -> None:
    """Assert that slots are [B] int64, contiguous: kernels read the slot of request b at address b."""
    assert slots.dim() == 1 and slots.dtype == torch.int64 and slots.is_contiguous(), "slots: [B] int64, contiguous"
