"""Limits concurrent generations and memory of one ingress. Requests beyond the limits are refused at once (429), never
queued here. The memory limit counts bodies, prompts and streams."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aerie.cluster.http.errors import overloaded, unavailable

# Tasks, connection and buffers of a generation in flight, measured with 2,000 streams at once
# (`tests/cluster/http/test_admission.py`).
STREAM_BYTES = 48 * 1024
TOKEN_BYTES = 44  # per prompt token: an int in a list, and four bytes for the engine


class Admission:
    """Limits the number of generations and their memory.

    max_generations: maximum concurrent generations.
    max_bytes: maximum memory of bodies, prompts and streams.
    draining: refuse new work with 503 while running work ends.
    engine_seen: whether an engine has been ready since this ingress started.
    num_active: current generations.
    num_bytes: current memory.
    """

    def __init__(self, max_generations: float = math.inf, max_bytes: int = 2**30, retry_after_s: float = 1.0) -> None:
        self._max_generations = max_generations
        self._max_bytes = max_bytes
        self._retry_after_s = retry_after_s
        self.draining = False
        self.engine_seen = False
        self.num_active = 0
        self.num_bytes = 0

    def check(self, num_generations: int = 1, num_bytes: int = 0) -> None:
        """Raise ApiError if this load would not be admitted now. Called before a request is read."""
        if self.draining:
            raise unavailable("The server is shutting down; another one will answer", self._retry_after_s)
        if self.num_active + num_generations > self._max_generations:
            raise overloaded(
                f"The server is busy: {self.num_active} of {self._max_generations} generations are in flight",
                self._retry_after_s,
            )
        self._check_bytes(num_bytes)

    @contextmanager
    def enter(self, num_generations: int, num_tokens: int = 0, input_bytes: int = 0) -> Iterator[None]:
        """Reserve room for generations with `num_tokens` prompt tokens, and `input_bytes` of other inputs, in all.
        Raises ApiError."""
        num_bytes = num_generations * STREAM_BYTES + num_tokens * TOKEN_BYTES + input_bytes
        self.check(num_generations, num_bytes)
        self.num_active += num_generations
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_active -= num_generations
            self.num_bytes -= num_bytes

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """Reserve memory for a body until its request is checked. Yields a function that counts more bytes of the body
        and raises ApiError."""
        total = 0

        def add(num_bytes: int) -> None:
            nonlocal total
            self._check_bytes(num_bytes)
            total += num_bytes
            self.num_bytes += num_bytes

        try:
            yield add
        finally:
            self.num_bytes -= total

    def _check_bytes(self, num_bytes: int) -> None:
        if self.num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise overloaded(
                f"The server is busy: bodies and prompts of {self.num_active} generations in flight take "
                f"{self.num_bytes} of {self._max_bytes} bytes",
                self._retry_after_s,
            )
