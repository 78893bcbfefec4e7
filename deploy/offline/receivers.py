"""Take token deltas from an engine's thread to its callers. Used by `aerie.deploy.offline.engine_thread`."""

import asyncio
import contextlib
import queue
import weakref
from typing import Protocol

from aerie.cluster.transport.messages import TokenDelta


class Receiver(Protocol):
    """Receives the deltas of its requests."""

    def put(self, deltas: list[TokenDelta]) -> None:
        """Receive a step's deltas. Called by the engine's thread; must return at once."""


class QueueReceiver:
    """Deltas for a thread, step by step."""

    def __init__(self) -> None:
        self.steps: queue.SimpleQueue[list[TokenDelta]] = queue.SimpleQueue()

    def put(self, deltas: list[TokenDelta]) -> None:
        self.steps.put(deltas)


class LoopReceiver:
    """Deltas for an event loop, by request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queues: dict[str, asyncio.Queue[TokenDelta]] = {}
        self._loop = weakref.ref(loop)

    def put(self, deltas: list[TokenDelta]) -> None:
        loop = self._loop()
        with contextlib.suppress(RuntimeError):  # closed; its generators have been closed before
            if loop is not None:
                loop.call_soon_threadsafe(self._put, deltas)

    def _put(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if (found := self.queues.get(delta.request_id)) is not None:
                found.put_nowait(delta)
