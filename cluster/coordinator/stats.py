"""The scheduler's state as the message that /health and /metrics are made of. Used by `cluster.coordinator.loop`."""

from cluster.transport.messages import EngineStats
from workers.scheduling.scheduler import Scheduler


def engine_stats(
    scheduler: Scheduler,
    engine_id: str,
    status: str,
    detail: str,
    num_worker_restarts: int,
    last_step_age_s: float,
    heartbeat_age_s: tuple[float, ...],
) -> EngineStats:
    """One engine's state now. Call it in the thread that runs the scheduler."""
    stats, cache = scheduler.stats, scheduler.prefix_cache
    return EngineStats(
        engine_id=engine_id,
        status=status,
        detail=detail,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        kv_usage=scheduler.kv_usage,
        num_pages=scheduler.allocator.num_pages,
        last_step_age_s=last_step_age_s,
        prefix_queries=0 if cache is None else cache.num_queried_tokens,
        prefix_hits=0 if cache is None else cache.num_hit_tokens,
        num_draft_tokens=stats.num_draft_tokens,
        num_worker_restarts=num_worker_restarts,
        heartbeat_age_s=heartbeat_age_s,
        scheduler=stats.copy(),
    )
