"""The queue's bounds, the Retry-After of a full queue, and the probe that follows a request's path."""

from aerie.cluster.config import EngineConfig
from aerie.cluster.transport.messages import GenerateRequest, Probe
from aerie.workers.config import SchedulerConfig
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.plan import SamplingParams, pack_i32
from aerie.workers.scheduling.queues.admission import UNKNOWN_S
from tests.support.cluster import until
from tests.support.scripted import scripted_output

COSTS = CostTable((RoundCosts((1,), (5.0,), (0.0,)),) * 2, (0,), (16,), ((5.0,),), (1,))


def _queue(bed, request_id, max_tokens=5, resumed=False):
    sampling = SamplingParams(max_tokens=max_tokens)
    bed.ingress.send(GenerateRequest(request_id, pack_i32([1, 2, 3, 4, 5]), sampling, resumed=resumed))


def test_a_full_queue_takes_the_resumed_and_tells_others_when_to_come_again(make_bed):
    bed = make_bed(max_waiting=2)
    for request_id in ("a", "b", "c"):
        _queue(bed, request_id)
    refusal = bed.ingress.read_refusal("c")
    assert (refusal.kind, refusal.retry_after_s) == ("queue_full", UNKNOWN_S)
    _queue(bed, "d", resumed=True)
    until(lambda: bed.coordinator.stats().num_waiting == 3)
    bed.attach()
    for request_id in ("a", "b", "d"):
        assert bed.ingress.read_end(request_id).finish == "length"


def test_a_burst_of_a_benchmark_is_queued_as_a_whole(make_bed):
    """`vllm bench serve` sends its 1,000 requests at once; with the configuration's defaults all of them are taken."""
    defaults = SchedulerConfig()
    bed = make_bed(max_waiting=defaults.max_waiting, queue_timeout_s=EngineConfig().queue_timeout_s)
    for i in range(1000):
        _queue(bed, f"q{i}", max_tokens=2)
    until(lambda: bed.coordinator.stats().num_waiting == 1000)
    bed.attach()
    assert {bed.ingress.read_end(f"q{i}").finish for i in range(1000)} == {"length"}


def test_retry_after_follows_the_queue(make_bed):
    bed = make_bed(max_running=1, max_waiting=30, delay_s=0.005)
    bed.attach(costs=COSTS)
    for i in range(25):
        _queue(bed, f"q{i}", max_tokens=20)
    bed.ingress.read_end("q9")  # ten have ended, so the usual length is known
    for i in range(25, 60):
        _queue(bed, f"q{i}", max_tokens=300)
    while not bed.ingress.refusals:
        assert bed.ingress.read()
    refusal = next(iter(bed.ingress.refusals.values()))
    assert refusal.kind == "queue_full"
    assert 1.0 <= refusal.retry_after_s != UNKNOWN_S, "by what steps take"


def test_who_would_wait_or_has_waited_too_long_is_refused(make_bed):
    bed = make_bed(queue_timeout_s=0.3)
    _queue(bed, "early")
    refusal = bed.ingress.read_refusal("early")
    assert refusal.kind == "queue_full"
    assert "waited 0.3 s in the queue (engine.queue_timeout_s)" in refusal.message
    assert bed.coordinator.stats().num_waiting == 0
    _queue(bed, "resumed", resumed=True)
    until(lambda: bed.coordinator.stats().num_waiting == 1)
    bed.attach()
    assert bed.ingress.read_end("resumed").finish == "length"
    params = bed.generate("runs", max_tokens=300)  # more than 0.3 s; who runs may take long
    assert bed.ingress.read_end("runs").finish == "length"
    assert bed.ingress.tokens("runs") == scripted_output(5, params)


def test_a_long_prompt_that_is_being_computed_is_not_refused(make_bed):
    """Ten chunks of 50 ms, with a limit of 0.2 s for the first step."""
    bed = make_bed(queue_timeout_s=0.2, delay_s=0.05)
    bed.attach()
    bed.generate("long", prompt_len=320, max_tokens=2)
    assert bed.ingress.read_end("long").finish == "length"


def test_a_probe_ends_like_a_request_and_runs_no_step(make_bed):
    bed = make_bed()
    bed.ingress.send(Probe("early"))
    refusal = bed.ingress.read_refusal("early")
    assert (refusal.kind, refusal.message) == ("not_ready", "the engine is starting")
    bed.attach()
    bed.ingress.send(Probe("p"))
    end = bed.ingress.read_end("p")
    assert (end.finish, end.tokens) == ("stop", ())
    assert bed.coordinator.stats().scheduler.num_steps == 0
    assert len(bed.coordinator.stats().heartbeat_age_s) == 2
