"""Publishes an engine's load and the digests of its cached pages to ingresses, which choose an engine by them, and the
scheduler's state for /health and /metrics. Used by `aerie.cluster.coordinator.loop` in its thread. A subscriber gets at
most one message per `PERIOD_S`, with at most `MAX_DIGESTS` digests; the rest follows in later messages."""

import math
from collections.abc import Callable, Sequence
from itertools import islice

from aerie.cluster.learning.published import PublishedDrafts
from aerie.cluster.transport.channel import IngressLink
from aerie.cluster.transport.messages import AdapterState, EngineState, EngineStats, Heartbeat
from aerie.workers.scheduling.adapters import AdapterChange
from aerie.workers.scheduling.scheduler import Scheduler
from aerie.workers.scheduling.stats import SchedulerStats

PERIOD_S = 0.05  # minimum seconds between two messages
MAX_DIGESTS = 2048  # maximum digests of pages per message
MAX_ADVERTISED_PAGES = 8192  # bound on an ingress's memory per engine; beyond it, every 2nd, 4th ... page


class _Subscriber:
    """What an ingress has not been sent yet.

    unsent: changed digests, and whether each is cached now.
    adapters: those of the last message, and the changes of adapters.
    """

    def __init__(self, unsent: dict[bytes, bool]) -> None:
        self.num_received = 0
        self.adapters: tuple[dict[str, AdapterState], dict[str, AdapterChange]] = ({}, {})
        self.unsent = unsent


class StatePublisher:
    """Publishes one engine's state. due_s: clock time of the next `publish`; infinity without a change.
    send: sends a message to a subscriber; may call `forget`.
    """

    def __init__(
        self,
        engine_id: str,
        scheduler: Scheduler,
        clock: Callable[[], float],
        send: Callable[[IngressLink, EngineState], None],
        identity: str = "",
    ) -> None:
        self.due_s = math.inf
        self._engine_id = engine_id
        self._identity = identity
        self._scheduler = scheduler
        self._clock = clock
        self._send = send
        self._subscribers: dict[IngressLink, _Subscriber] = {}
        self._last_s = -math.inf
        num_pages = scheduler.allocator.num_pages
        self._stride = 1 << max(0, math.ceil(math.log2(num_pages / MAX_ADVERTISED_PAGES)))

    def subscribe(self, ingress: IngressLink) -> None:
        """Send states to an ingress until `forget`."""
        cache = self._scheduler.prefix_cache
        if not self._subscribers and cache is not None:
            cache.watch(self._stride)
        self._subscribers[ingress] = _Subscriber({} if cache is None else dict.fromkeys(cache.digests(), True))
        self.publish_soon()

    def count_request(self, ingress: IngressLink) -> None:
        """Count a request of this ingress."""
        subscriber = self._subscribers.get(ingress)
        if subscriber is not None:
            subscriber.num_received += 1
        self.publish_soon()

    def publish_soon(self) -> None:
        """Publish the state within `PERIOD_S`, because it may have changed."""
        if self.due_s == math.inf and self._subscribers:
            self.due_s = self._last_s + PERIOD_S

    def forget(self, ingress: IngressLink) -> None:
        """Remove an ingress."""
        if self._subscribers.pop(ingress, None) is not None and not self._subscribers:
            self.due_s = math.inf
            if self._scheduler.prefix_cache is not None:
                self._scheduler.prefix_cache.watch(0)

    def publish(self, status: str, fault: str, is_leaving: bool, wait_s: float) -> None:
        """Send the state to every subscriber. The arguments are fields of `EngineState`."""
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
            "weight_epoch": scheduler.weights.epoch,
            "identity": self._identity,
        }
        adapters = {
            adapter.name: AdapterState(adapter.path, adapter.number, adapter.index >= 0)
            for adapter in scheduler.adapters.loaded
        }
        changes_of_adapters = dict(scheduler.adapters.changes)
        for ingress, subscriber in list(self._subscribers.items()):
            known, subscriber.adapters = subscriber.adapters, (adapters, changes_of_adapters)
            changed = (None, None) if known == subscriber.adapters else subscriber.adapters
            subscriber.unsent.update(changes)
            sent = dict(islice(subscriber.unsent.items(), MAX_DIGESTS))
            for digest in sent:
                del subscriber.unsent[digest]
            state = EngineState(
                self._engine_id,
                status,
                fault,
                is_leaving,
                subscriber.num_received,
                added=b"".join(digest for digest, is_cached in sent.items() if is_cached),
                removed=b"".join(digest for digest, is_cached in sent.items() if not is_cached),
                adapters=changed[0],
                adapter_changes=changed[1],
                **load,  # type: ignore[arg-type]
            )
            self._send(ingress, state)
            if subscriber.unsent:
                self.publish_soon()


def engine_stats(
    scheduler: Scheduler,
    engine_id: str,
    status: str,
    detail: str,
    num_worker_restarts: int,
    last_step_age_s: float,
    heartbeat_age_s: tuple[float, ...],
    heartbeats: Sequence[Heartbeat] = (),
    slot_wait_s: float = 0.0,
    drafts: PublishedDrafts | None = None,
) -> EngineStats:
    """Return an engine's state. Call it in the scheduler's thread."""
    stats, cache = scheduler.stats, scheduler.prefix_cache
    speed = scheduler.prefill_tokens_per_s()
    learned = {} if drafts is None else drafts.counts()
    return EngineStats(
        engine_id=engine_id,
        status=status,
        detail=detail,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        kv_usage=scheduler.kv_usage,
        num_pages=scheduler.allocator.num_pages,
        num_slots=scheduler.num_slots,
        cache_config=cache_config(scheduler),
        backlog_s=scheduler.backlog_tokens / speed if speed else 0.0,
        slot_wait_s=slot_wait_s,
        last_step_age_s=last_step_age_s,
        prefix_queries=0 if cache is None else cache.num_queried_tokens,
        prefix_hits=0 if cache is None else cache.num_hit_tokens,
        prefix_recomputed=0 if cache is None else cache.num_recomputed_tokens,
        num_draft_tokens=stats.num_draft_tokens,
        num_worker_restarts=num_worker_restarts,
        num_graphs=scheduler.captures.graphs.num_captured,
        num_graphs_waiting=scheduler.captures.graphs.num_waiting,
        num_dead_drafts=int(bool(scheduler.weights.draft.fault)),
        rounds_by_adapter={adapter.name: adapter.draft.num_rounds for adapter in scheduler.adapters.loaded},
        accepted_by_adapter={adapter.name: adapter.draft.num_accepted for adapter in scheduler.adapters.loaded},
        heartbeat_age_s=heartbeat_age_s,
        rank_steps=tuple(heartbeat.num_steps for heartbeat in heartbeats),
        rank_step_s=tuple(heartbeat.step_s for heartbeat in heartbeats),
        scheduler=stats.copy(),
        **learned,
    )


def cache_config(scheduler: Scheduler) -> dict[str, str]:
    """Return the KV cache's configuration under vLLM's names."""
    cache = scheduler.cache
    return {
        "block_size": str(cache.page_size),
        "num_gpu_blocks": str(scheduler.allocator.num_pages),
        "enable_prefix_caching": str(cache.prefix_cache),
        "gpu_memory_utilization": str(cache.memory_share),
    }


def continue_counters(scheduler: Scheduler, former: EngineStats) -> None:
    """Start the counters of a new `scheduler`, which has not run yet, at the last values of a lost coordinator."""
    if former.scheduler is not None:
        counted = former.scheduler.copy()
        for name in SchedulerStats.__struct_fields__:
            setattr(scheduler.stats, name, getattr(counted, name))
    if scheduler.prefix_cache is not None:
        scheduler.prefix_cache.num_queried_tokens = former.prefix_queries
        scheduler.prefix_cache.num_hit_tokens = former.prefix_hits
        scheduler.prefix_cache.num_recomputed_tokens = former.prefix_recomputed
