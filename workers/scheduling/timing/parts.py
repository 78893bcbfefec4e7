"""The terms ("parts") of log(time / table), where table is the time of a step in the measured table.

The logarithm is a sum of parts:
- the pace, which all steps share;
- a part of the tree shape, and a part of the shape and batch size (rounded up to a power of two);
- for a step with prompt tokens, instead of these two, a part of the number of prompt tokens (in powers of two) and of
  whether it has rounds.
"""

import numpy as np
from numpy.typing import NDArray

from aerie.workers.scheduling.timing.step import Step

PACE = 0  # index of the pace
# prior standard deviations
PACE_ERROR = 0.7  # load and temperature may differ from the start
SHAPE_ERROR = 0.4  # of one shape, relative to the pace; a start under load measured 24 to 75 ms for the same rounds
BATCH_ERROR = 0.4  # of one shape at one batch size, relative to the shape: tables interpolate between a few sizes
CHUNK_ERROR = 0.3  # of steps with one number of prompt tokens, relative to the pace


class StepParts:
    """Assigns an index to each part.

    prior: [parts] float64 variances before any step is observed.
    """

    def __init__(self, num_shapes: int, max_requests: int, max_chunk_tokens: int) -> None:
        self._num_batches = max(1, max_requests).bit_length() + 1
        num_chunks = max_chunk_tokens.bit_length() + 2
        self._first_batch = 1 + num_shapes
        self._first_chunk = self._first_batch + num_shapes * self._num_batches
        self._last_chunk = num_chunks - 1
        errors = np.full(self._first_chunk + 2 * num_chunks, CHUNK_ERROR)
        errors[PACE], errors[1 : self._first_batch] = PACE_ERROR, SHAPE_ERROR
        errors[self._first_batch : self._first_chunk] = BATCH_ERROR
        self.prior: NDArray[np.float64] = errors**2

    def of(self, step: Step) -> list[int]:
        """Return the indices of the parts that a step's time is the sum of. The last index identifies the kind of
        step."""
        if step.chunk_tokens:
            at = min(step.chunk_tokens.bit_length(), self._last_chunk)
            return [PACE, self._first_chunk + 2 * at + (step.num_requests > 0)]
        batch = min(max(step.num_requests - 1, 0).bit_length(), self._num_batches - 1)
        return [PACE, 1 + step.shape, self._first_batch + step.shape * self._num_batches + batch]
