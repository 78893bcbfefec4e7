"""Switches the checks of contracts (`aerie.kernels.operation`) on, and has checks that several operations
share."""

import torch
from torch import Tensor

checked = False
"""Whether every call checks its contract. Set by `check_every_call`."""


def check_every_call() -> None:
    """Check contracts at every call in this process from now on. Only for tests and debug mode, because the checks take
    about 5 % of a CPU rank's time."""
    global checked
    checked = True


def check_slots(slots: Tensor) -> None:
    """Assert that slots are [B] int64 and contiguous, because kernels read them without a stride."""
    assert slots.dim() == 1 and slots.dtype == torch.int64 and slots.is_contiguous(), "slots: [B] int64, contiguous"
