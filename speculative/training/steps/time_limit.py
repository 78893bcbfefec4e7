"""Ends a training run after a given time, at the lowest learning rate. Used by `speculative.training.trainer`."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

_FINAL_RATE = 0.01  # learning rate at the end, as a fraction of the peak


@dataclass
class TimeLimit:
    """A time limit, and the learning rate under it. seconds: None for no limit. clock: returns seconds."""

    seconds: float | None
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def share(self) -> float:
        """Return the fraction of the time that has passed, 0 without a limit."""
        return 0.0 if self.seconds is None else (self.clock() - self.started) / self.seconds

    def scheduler(self, optimizer: Optimizer, warmup_steps: int, max_steps: int) -> LambdaLR:
        """Return `learning_rate` as torch's scheduler."""
        return LambdaLR(optimizer, lambda step: self.learning_rate(step, warmup_steps, max_steps))

    def learning_rate(self, step: int, warmup_steps: int, max_steps: int) -> float:
        """Return the learning rate of a step as a fraction of the peak: linear warm-up, then a cosine over steps or
        time, whichever ends first."""
        if step < warmup_steps:
            return step / warmup_steps
        done = max((step - warmup_steps) / max(1, max_steps - warmup_steps), self.share())
        return _FINAL_RATE + (1 - _FINAL_RATE) * (1 + math.cos(math.pi * min(1.0, done))) / 2
