"""The work of a step, and its predicted time."""

import math
from typing import NamedTuple


class Step(NamedTuple):
    """The work of a step.

    shape: index of the shape that its rounds verify and draft.
    num_requests: requests that run a round.
    kv_tokens: total committed tokens of these requests.
    chunk_tokens: prompt tokens in the step.
    context_tokens: tokens before a chunk in its request, averaged over the prompt tokens.
    """

    shape: int = 0
    num_requests: int = 0
    kv_tokens: int = 0
    chunk_tokens: int = 0
    context_tokens: float = 0.0


class Prediction(NamedTuple):
    """Predicted time of a step.

    ms: mean milliseconds.
    error: standard error of the logarithm of that mean.
    noise: standard deviation of the logarithm of one step's time around the mean.
    """

    ms: float
    error: float
    noise: float = 0.0

    @property
    def early_ms(self) -> float:
        """Milliseconds by which the step may end early: one standard deviation."""
        return self.ms * -math.expm1(-math.hypot(self.error, self.noise))
