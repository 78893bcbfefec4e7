"""What ingresses choose an engine by: its load and the digests of its cached pages, sent to those who subscribed.

Used by `cluster.coordinator.loop` in its thread. Bounded in rate and size: a message per subscriber each `PERIOD_S` at
most, with `MAX_DIGESTS` digests at most; what has changed beyond goes with the next ones.
"""

import math
from collections.abc import Callable
from itertools import islice

from cluster.transport.channel import IngressLink
from cluster.transport.messages import EngineState
from workers.scheduling.scheduler import Scheduler

PERIOD_S = 0.05
MAX_DIGESTS = 2048
# per engine, which bounds what an ingress keeps of it: beyond, each second page is told, or fourth
MAX_TOLD_PAGES = 8192


class _Subscriber:
    """untold: by digest whether the page is here, of what has changed since the last message."""

    def __init__(self, untold: dict[bytes, bool]) -> None:
        self.num_received = 0
        self.untold = untold


class StatePublisher:
    """due_s: when `publish` has something to do, by the clock; infinity while nothing has changed.

    send: one message to one subscriber; it may call `forget`.
    """

    def __init__(
        self,
        engine_id: str,
        scheduler: Scheduler,
        clock: Callable[[], float],
        send: Callable[[IngressLink, EngineState], None],
    ) -> None:
        self.due_s = math.inf
        self._engine_id = engine_id
        self._scheduler = scheduler
        self._clock = clock
        self._send = send
        self._subscribers: dict[IngressLink, _Subscriber] = {}
        self._last_s = -math.inf
        num_pages = scheduler.allocator.num_pages
        self._stride = 1 << max(0, math.ceil(math.log2(num_pages / MAX_TOLD_PAGES)))

    def subscribe(self, ingress: IngressLink) -> None:
        """From now on, until it is forgotten."""
        cache = self._scheduler.prefix_cache
        if not self._subscribers and cache is not None:
            cache.watch(self._stride)
        self._subscribers[ingress] = _Subscriber({} if cache is None else dict.fromkeys(cache.digests(), True))
        self.changed()

    def received(self, ingress: IngressLink) -> None:
        """A request of this ingress was read."""
        subscriber = self._subscribers.get(ingress)
        if subscriber is not None:
            subscriber.num_received += 1
        self.changed()

    def changed(self) -> None:
        """Something that is told has changed, or may have."""
        if self.due_s == math.inf and self._subscribers:
            self.due_s = self._last_s + PERIOD_S

    def forget(self, ingress: IngressLink) -> None:
        """It has gone."""
        if self._subscribers.pop(ingress, None) is not None and not self._subscribers:
            self.due_s = math.inf
            if self._scheduler.prefix_cache is not None:
                self._scheduler.prefix_cache.watch(0)

    def publish(self, status: str, fault: str, is_leaving: bool, wait_s: float) -> None:
        """Tell every subscriber what is so now; the arguments are fields of `EngineState`."""
        self.due_s = math.inf
        if not self._subscribers:
            return
        self._last_s = self._clock()
        scheduler = self._scheduler
        cache = scheduler.prefix_cache
        changes = {} if cache is None else cache.take_changes()
        load = {
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "num_slots": scheduler.num_slots,
            "backlog_tokens": scheduler.backlog_tokens,
            "prefill_tokens_per_s": scheduler.prefill_tokens_per_s(),
            "wait_s": wait_s,
            "page_size": 0 if cache is None else cache.page_size,
            "lookahead": 0 if cache is None else cache.lookahead,
            "stride": self._stride,
        }
        for ingress, subscriber in list(self._subscribers.items()):
            subscriber.untold.update(changes)
            told = dict(islice(subscriber.untold.items(), MAX_DIGESTS))
            for digest in told:
                del subscriber.untold[digest]
            state = EngineState(
                self._engine_id,
                status,
                fault,
                is_leaving,
                subscriber.num_received,
                added=b"".join(digest for digest, here in told.items() if here),
                removed=b"".join(digest for digest, here in told.items() if not here),
                **load,  # type: ignore[arg-type]
            )
            self._send(ingress, state)
            if subscriber.untold:
                self.changed()
