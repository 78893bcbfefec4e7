"""The scheduler's state as a message for /health and /metrics. Used by `aerie.cluster.coordinator.loop`."""

from collections.abc import Sequence

from aerie.cluster.learning.published import PublishedDrafts
from aerie.cluster.transport.messages import EngineStats, Heartbeat
from aerie.workers.scheduling.scheduler import Scheduler
from aerie.workers.scheduling.stats import SchedulerStats


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
        rounds_by_adapter={each.name: each.draft.num_rounds for each in scheduler.adapters.loaded},
        accepted_by_adapter={each.name: each.draft.num_accepted for each in scheduler.adapters.loaded},
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
