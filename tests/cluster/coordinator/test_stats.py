"""Counters of a coordinator that was lost go on in the next one."""

from aerie.attention.config import CacheConfig
from aerie.cluster.coordinator.state_publisher import continue_counters, engine_stats
from aerie.cluster.transport.messages import EngineStats
from aerie.workers.config import PLAIN, RoundShape, RoundShapes, SchedulerConfig
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from aerie.workers.scheduling.scheduler import Scheduler

SHAPES = RoundShapes((PLAIN, RoundShape(name="tree", width=6, max_new_tokens=4, draft_tokens=2)), default=1)


def _scheduler() -> Scheduler:
    config = SchedulerConfig(max_running=4, max_step_tokens=32, max_waiting=20)
    return Scheduler(config, CacheConfig(page_size=4), 200, 400, lambda: 5.0, SHAPES, 1)


def _stats(scheduler: Scheduler) -> EngineStats:
    return engine_stats(scheduler, "e", "ready", "", 2, 0.5, (0.1, 0.2))


def test_new_scheduler_goes_on_counting_where_the_lost_one_stopped() -> None:
    lost = _scheduler()
    lost.submit(Request("a", list(range(9)), SamplingParams(max_tokens=3)))
    lost.schedule()
    lost.stats.count_finished("stop")
    lost.stats.e2e_s.observe(3.0)
    assert lost.prefix_cache is not None
    lost.prefix_cache.num_queried_tokens, lost.prefix_cache.num_hit_tokens = 90, 40
    lost.prefix_cache.num_recomputed_tokens = 20
    former = _stats(lost)

    new = _scheduler()
    continue_counters(new, former)
    now = _stats(new)
    assert now.scheduler == former.scheduler
    assert (now.prefix_queries, now.prefix_hits, now.prefix_recomputed) == (90, 40, 20)
    assert (now.num_running, now.num_waiting, now.kv_usage) == (0, 0, 0)
    new.submit(Request("b", list(range(7)), SamplingParams(max_tokens=3)))
    new.schedule()
    new.stats.e2e_s.observe(1.0)
    after = _stats(new).scheduler
    assert after is not None and former.scheduler is not None
    assert after.prompt_tokens == former.scheduler.prompt_tokens + 7
    assert after.e2e_s.total == 4.0 and former.scheduler.e2e_s.total == 3.0


def test_coordinator_lost_before_it_had_a_scheduler_has_no_counts() -> None:
    new = _scheduler()
    continue_counters(new, EngineStats("e", "starting"))
    assert _stats(new) == _stats(_scheduler())
