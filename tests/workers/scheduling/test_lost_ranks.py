"""Which requests are suspected if ranks fail in a step, and how these are tried again one at a time."""

from aerie.workers.scheduling.queues.request_queues import PROBATION_STEPS
from aerie.workers.scheduling.request import Request
from tests.support.simulation.scheduler import Simulation


def names(requests: list[Request]) -> list[str]:
    return [request.request_id for request in requests]


def test_without_a_step_in_flight_no_request_is_blamed() -> None:
    sim = Simulation(max_in_flight=1)
    sim.submit([1, 2, 3])
    sim.step()
    assert sim.scheduler.num_running and sim.scheduler.blamed() == []
    sim.scheduler.requeue_all(1)
    assert sim.scheduler.queues.suspects == set()


def test_after_a_failed_step_suspects_run_one_at_a_time_and_alone_are_blamed() -> None:
    sim = Simulation(max_in_flight=1, prefix_cache=False)
    for _ in range(2):
        sim.submit([1, 2, 3], max_tokens=40)
    sim.step()
    sim.schedule()
    assert names(sim.scheduler.blamed()) == ["r0", "r1"]
    sim.new_worker_group(1)
    sim.submit([4, 5], max_tokens=40)
    sim.schedule()
    assert sim.scheduler.num_running == 2, "one suspect, beside the request that was in no failed step"
    assert names(sim.scheduler.blamed()) == ["r0"]
    sim.read()
    for _ in range(PROBATION_STEPS):
        sim.step()
    assert sim.scheduler.num_running == 3, "the first is cleared by its tokens, the second runs"
    sim.schedule()
    assert names(sim.scheduler.blamed()) == ["r1"]
    sim.run()


def test_a_blamed_request_that_is_aborted_leaves_the_others_suspected() -> None:
    sim = Simulation(max_in_flight=1, prefix_cache=False)
    for _ in range(3):
        sim.submit([1, 2, 3], max_tokens=40)
    sim.step()
    sim.schedule()
    sim.new_worker_group(1)
    sim.schedule()
    (blamed,) = sim.scheduler.blamed()
    sim.scheduler.abort(blamed.request_id)
    sim.outputs.pop(blamed.request_id)
    assert len(sim.scheduler.queues.suspects) == 2
