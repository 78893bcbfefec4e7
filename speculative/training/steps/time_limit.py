"""A training that ends after a given time, at the lowest learning rate. Used by `speculative.training.trainer`."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

_LEAST = 0.01  # of the peak learning rate, at the end


@dataclass
class TimeLimit:
    """seconds: None for a training that steps alone end. clock: in seconds, from any start."""

    seconds: float | None
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    def share(self) -> float:
        """Return the part of the time that has passed, 0 without a limit."""
        return 0.0 if self.seconds is None else (self.clock() - self.began) / self.seconds

    def scheduler(self, optimizer: Optimizer, warmup_steps: int, max_steps: int) -> LambdaLR:
        """Return torch's scheduler of `learning_rate`."""
        return LambdaLR(optimizer, lambda step: self.learning_rate(step, warmup_steps, max_steps))

    def learning_rate(self, step: int, warmup_steps: int, max_steps: int) -> float:
        """Return the learning rate of a step as a fraction of the peak: linear warm-up, then a cosine over steps or
        time, whichever ends first."""
        if step < warmup_steps:
            return step / warmup_steps
        done = max((step - warmup_steps) / max(1, max_steps - warmup_steps), self.share())
        return _LEAST + (1 - _LEAST) * (1 + math.cos(math.pi * min(1.0, done))) / 2
