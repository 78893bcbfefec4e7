"""The scheduler empties its prefix cache between requests only."""

import pytest

from aerie.workers.scheduling.request import UnfinishedError
from tests.support.simulation.scheduler import Simulation


def test_after_a_flush_nothing_is_found_and_every_page_is_free() -> None:
    sim = Simulation(page_size=4, lookahead=1, num_pages=30)
    prompt = list(range(20))
    sim.submit(prompt, max_tokens=2)
    sim.finish()
    num_cached = sim.scheduler.allocator.num_evictable
    assert sim.scheduler.flush_prefix_cache() == num_cached >= 4
    assert sim.scheduler.allocator.num_free == 30
    cold = sim.submit(prompt, max_tokens=2)
    sim.finish()
    warm = sim.submit(prompt, max_tokens=2)
    sim.finish()
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 16)
    for request in (cold, warm):
        sim.check_output(request)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_flush_is_refused_while_a_request_waits_or_runs_and_changes_nothing(steps: int) -> None:
    sim = Simulation(page_size=4, lookahead=1)
    sim.submit(list(range(20)), max_tokens=2)
    sim.finish()
    request = sim.submit(list(range(20)), max_tokens=20)
    for _ in range(steps):
        sim.step()
    state = "0 requests run and 1 wait" if steps == 0 else "1 requests run and 0 wait"
    with pytest.raises(UnfinishedError, match=state):
        sim.scheduler.flush_prefix_cache()
    sim.run()
    assert request.cached_tokens == 16
    sim.check_output(request)


def test_a_flush_between_requests_may_find_steps_in_flight() -> None:
    """An aborted request leaves plans whose results are still to come; its pages go to others in later plans only."""
    sim = Simulation(page_size=4, lookahead=1, max_in_flight=3, num_pages=12)
    aborted = sim.submit(list(range(20)), max_tokens=20)
    for _ in range(3):
        sim.schedule()
    sim.scheduler.abort(aborted.request_id)
    assert sim.scheduler.num_in_flight == 3
    sim.scheduler.flush_prefix_cache()
    assert sim.scheduler.allocator.num_free == 12
    for start in (7, 0):
        request = sim.submit(list(range(start, start + 20)), max_tokens=12)
        sim.run()
        assert request.cached_tokens == 0
        sim.check_output(request)


def test_without_a_prefix_cache_there_is_nothing_to_flush() -> None:
    sim = Simulation(prefix_cache=False)
    sim.submit([1, 2, 3], max_tokens=2)
    sim.run()
    assert sim.scheduler.flush_prefix_cache() == 0
