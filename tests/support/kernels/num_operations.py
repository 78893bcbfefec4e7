"""Counts the torch operations that a piece of code runs, which on a CPU tell its time better than a loaded clock."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def num_operations(run: Callable[[], object]) -> int:
    """Return how many torch operations `run` dispatches."""
    with _Counting() as counting:
        run()
    return counting.count
