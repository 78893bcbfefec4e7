"""Many waiting requests: what they cost in time and memory, and where the queue ends."""

import sys
import tracemalloc
from array import array
from typing import Any

import pytest

from aerie.attention.config import CacheConfig
from aerie.workers.config import SchedulerConfig
from aerie.workers.scheduling.plan import Grammar, SamplingParams, pack_i32
from aerie.workers.scheduling.queues.waiting_queue import BYTES_PER_TOKEN, REQUEST_BYTES
from aerie.workers.scheduling.request import QueueFullError, Request
from aerie.workers.scheduling.scheduler import Scheduler
from tests.support.simulation.scheduler import Clock, Simulation


def _scheduler(**config: Any) -> Scheduler:
    config = {"max_running": 4, "max_step_tokens": 16} | config
    return Scheduler(SchedulerConfig(**config), CacheConfig(page_size=4), 60, 100, Clock())


def _request(number: int, num_tokens: int = 6, **sampling: Any) -> Request:
    prompt = array("i", [(number + i) % 200 for i in range(num_tokens)])
    return Request(f"r{number}", prompt, SamplingParams(**{"max_tokens": 8, "seed": number} | sampling))


def _calls(work: Any) -> int:
    """How many Python functions and generator steps `work` takes: time without a clock."""
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("grammar", [None, Grammar("regex", "a+", ())], ids=["plain", "uncompiled grammar"])
def test_a_step_and_the_state_that_is_told_cost_no_more_with_many_waiting(grammar: Grammar | None) -> None:
    def cost(num_waiting: int) -> int:
        scheduler = _scheduler()
        runs = 2  # slots stay free: the queue is looked through for what may be admitted
        for number in range(runs):
            scheduler.submit(_request(number, max_tokens=50))
        scheduler.schedule()
        for number in range(runs, runs + num_waiting):
            # Each its own grammar, of which the first few are announced.
            own = grammar and Grammar("regex", f"{grammar.text}{number}", ())
            scheduler.submit(_request(number, num_tokens=90, grammar=own))
        return _calls(lambda: (scheduler.schedule(), scheduler.backlog_tokens, scheduler.prefill_tokens_per_s()))

    assert cost(4_000) <= cost(400) + 10


def test_an_arrival_costs_no_more_than_the_logarithm_of_the_queue() -> None:
    def cost(num_waiting: int) -> int:
        scheduler = _scheduler()
        for number in range(num_waiting):
            scheduler.submit(_request(number))
        return _calls(lambda: scheduler.submit(_request(num_waiting)))

    assert cost(4_000) <= cost(100) + 10


def test_a_waiting_request_takes_the_memory_that_is_counted_for_it() -> None:
    """Between a half and the whole: the publisher's stream comes on top."""
    num_requests, num_tokens = 100, 1000
    scheduler = Scheduler(SchedulerConfig(max_running=4, max_step_tokens=16), CacheConfig(), 1000, 4096, Clock())
    tracemalloc.start()
    try:
        for number in range(num_requests):
            raw = pack_i32([(number + i) % 50_000 for i in range(num_tokens)])
            sampling = SamplingParams(max_tokens=8, seed=number, stop_token_ids=(1, 2, 3))
            scheduler.submit(Request(f"chatcmpl-{number:032}-0", array("i", raw), sampling))
        took = tracemalloc.get_traced_memory()[0] / num_requests
    finally:
        tracemalloc.stop()
    counted = REQUEST_BYTES + num_tokens * BYTES_PER_TOKEN
    assert counted / 2 < took < counted


def test_the_queue_takes_a_burst_and_ends_where_its_memory_does() -> None:
    scheduler = _scheduler()
    for number in range(3000):
        scheduler.submit(_request(number))
    room = 10 * (REQUEST_BYTES + 50 * BYTES_PER_TOKEN)
    small = _scheduler(max_waiting_bytes=room)
    for number in range(10):
        small.submit(_request(number, num_tokens=50))
    with pytest.raises(QueueFullError, match=f"max_waiting_bytes={room}: 10 requests with 500 prompt tokens wait"):
        small.submit(_request(10, num_tokens=50))
    small.submit(_request(11, num_tokens=50), resumed=True)


def test_an_empty_queue_takes_a_prompt_of_any_length() -> None:
    _scheduler(max_waiting_bytes=1).submit(_request(0, num_tokens=60))


def test_totals_follow_requests_that_are_preempted_aborted_and_resumed() -> None:
    sim = Simulation(num_pages=24, max_running=4)  # checks the totals at every step
    for number in range(12):
        sim.submit([number] * (5 + number), max_tokens=30)
    for _ in range(10):
        sim.step()
    sim.scheduler.abort("r11")
    sim.new_worker_group(1)
    sim.run()
    assert sim.scheduler.stats.num_preemptions > 0
    assert sim.scheduler.queues.waiting.load == (0, 0, 0, 0, 0)
