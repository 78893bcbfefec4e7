"""A cached value that is fetched again when it is requested and too old. Callers may limit their wait."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Refreshed(Generic[T]):
    """A value at most `max_age_s` old. One fetch runs at a time, in the caller's event loop.

    last: the last result of `fetch`; None before the first.
    """

    def __init__(self, fetch: Callable[[], Awaitable[T]], max_age_s: float, clock: Callable[[], float]) -> None:
        self.last: T | None = None
        self._fetch = fetch
        self._max_age_s = max_age_s
        self._clock = clock
        self._fetched_s = float("-inf")
        self._started_s = 0.0
        self._task: asyncio.Task[T] | None = None

    @property
    def waiting_s(self) -> float:
        """Seconds that the current fetch has been running; 0 without one."""
        return 0.0 if self._task is None else self._clock() - self._started_s

    async def refresh(self, wait_s: float) -> None:
        """Fetch the value if it is too old. Wait at most `wait_s`; the fetch continues after that."""
        if self._task is not None or self._is_old():
            await asyncio.wait((self._fetching(),), timeout=wait_s)

    async def newest(self) -> T:
        """Return a value that is not too old, however long the fetch takes. Raises what `fetch` raises."""
        if self._task is None and self.last is not None and not self._is_old():
            return self.last
        return await asyncio.shield(self._fetching())

    def _is_old(self) -> bool:
        return self._clock() >= self._fetched_s + self._max_age_s

    def _fetching(self) -> "asyncio.Task[T]":
        """Return the current fetch, or a new one."""
        if self._task is None:
            self._started_s = self._clock()
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(_log_failure)
        return self._task

    async def _run(self) -> T:
        try:
            self.last = await self._fetch()
            self._fetched_s = self._clock()
            return self.last
        finally:
            self._task = None


def _log_failure(task: "asyncio.Task[T]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a cached value could not be fetched again", exc_info=task.exception())
