"""Finish codes: why a request's newest token is its last. `commit` writes them; `aerie.workers.scheduling` reads them
without torch."""

FINISH_NONE, FINISH_STOP, FINISH_LENGTH = 0, 1, 2  # why a request has ended, as kernels write it
FINISH_NOT_FINITE = 3  # NaN or infinite logits; the rank turns it into a `Failure`
