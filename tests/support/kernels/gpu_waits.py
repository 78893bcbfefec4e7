"""torch's own check that nothing waits for the GPU."""

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def refuse_gpu_waits() -> Iterator[None]:
    """Every synchronising operation and blocking copy in the block raises RuntimeError; afterwards none does, whatever
    happened."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")  # torch 2.11
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
