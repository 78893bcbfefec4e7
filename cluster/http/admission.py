"""How many generations one ingress carries at a time; more are refused at once (429) and never queued here."""

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.http.errors import overloaded, unavailable


class Admission:
    """Counts generations.

    limit: at a time.
    draining: set it to refuse all new work with 503 while running work ends.
    engine_seen: whether an engine has been ready since this ingress started.
    """

    def __init__(self, limit: int, retry_after_s: float) -> None:
        self._limit = limit
        self._retry_after_s = retry_after_s
        self.draining = False
        self.engine_seen = False
        self.num_active = 0

    def check(self, num_generations: int = 1) -> None:
        """Whether so many would be admitted now, for refusing before the work of reading a request. Raises ApiError."""
        if self.draining:
            raise unavailable("The server is shutting down; another one will answer", self._retry_after_s)
        if self.num_active + num_generations > self._limit:
            raise overloaded(
                f"The server is busy: {self.num_active} of {self._limit} generations are in flight", self._retry_after_s
            )

    @contextmanager
    def enter(self, num_generations: int) -> Iterator[None]:
        """Hold places for so many generations. Raises ApiError."""
        self.check(num_generations)
        self.num_active += num_generations
        try:
            yield
        finally:
            self.num_active -= num_generations
