"""How much longer rounds take than the costs that the start measured: by shape and number of requests, from the steps
that ran. Used by `workers.scheduling.shape_choice`.

A start measures in short bursts, on a cool device, with nothing beside it; a server's rounds wait for a host that is
slower than they are, or run at the clock that a device's power allows.
"""

import numpy as np

WINDOW = 64.0  # steps after which a step has been forgotten to 1 / e
PRIOR = 1.0  # steps that are taken to have been as expected
KNOWN = 3.0  # steps after which a shape's own say enough
MOST = 4.0  # times what was expected so far that one step counts at most; it may have waited for something else


class CostCorrection:
    """Numbers of requests count as one up to the next power of two."""

    def __init__(self, num_shapes: int, max_requests: int) -> None:
        size = num_shapes, max_requests.bit_length() + 1
        self._expected_ms, self._took_ms, self._steps = np.zeros(size), np.zeros(size), np.zeros(size)

    def observe(self, shape: int, num_requests: int, expected_ms: float, took_ms: float) -> None:
        """A step of rounds alone took `took_ms` where the costs say `expected_ms`."""
        at = shape, _bucket(num_requests)
        took_ms = min(took_ms, MOST * expected_ms * self.factor(shape, num_requests))
        for sums, value in ((self._expected_ms, expected_ms), (self._took_ms, took_ms), (self._steps, 1.0)):
            sums[at] = sums[at] * (1.0 - 1.0 / WINDOW) + value

    def factor(self, shape: int, num_requests: int) -> float:
        """What the costs of a round are to be multiplied by."""
        at = shape, _bucket(num_requests)
        steps = float(self._steps[at])
        if steps == 0.0:
            return 1.0
        expected_ms = float(self._expected_ms[at])
        prior_ms = PRIOR * expected_ms / steps
        return (float(self._took_ms[at]) + prior_ms) / (expected_ms + prior_ms)

    def is_known(self, shape: int, num_requests: int) -> bool:
        """Whether enough rounds of the shape have run."""
        return bool(self._steps[shape, _bucket(num_requests)] >= KNOWN)


def _bucket(num_requests: int) -> int:
    return (num_requests - 1).bit_length()
