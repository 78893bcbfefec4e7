"""From the scheduler's counters to the message that /health and /metrics are made of."""

from cluster.transport.messages import EngineStats, Histogram
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.stats import HistogramCounts


def engine_stats(
    scheduler: Scheduler, engine_id: str, status: str, detail: str, num_worker_restarts: int, last_step_age_s: float
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
        num_steps=stats.num_steps,
        num_preemptions=stats.num_preemptions,
        num_worker_restarts=num_worker_restarts,
        prompt_tokens=stats.prompt_tokens,
        generation_tokens=stats.generation_tokens,
        prefix_queries=0 if cache is None else cache.num_queried_tokens,
        prefix_hits=0 if cache is None else cache.num_hit_tokens,
        finished=dict(stats.finished),
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_drafts * scheduler.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        accepted_per_position=stats.accepted_per_position,
        last_step_age_s=last_step_age_s,
        histograms={
            "time_to_first_token_seconds": _histogram(stats.time_to_first_token_s),
            "inter_token_latency_seconds": _histogram(stats.inter_token_s),
            "request_time_per_output_token_seconds": _histogram(stats.time_per_output_token_s),
            "e2e_request_latency_seconds": _histogram(stats.e2e_s),
            "request_queue_time_seconds": _histogram(stats.queue_s),
            "request_prompt_tokens": _histogram(stats.request_prompt_tokens),
            "request_generation_tokens": _histogram(stats.request_generation_tokens),
            "step_seconds": _histogram(stats.step_s),
        },
    )


def _histogram(counts: HistogramCounts) -> Histogram:
    return Histogram(bounds=counts.bounds, counts=tuple(counts.counts), total=counts.total)
