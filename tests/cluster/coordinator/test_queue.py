"""How the queue is bounded, what who finds it full is told, and the probe that goes a request's way."""

import pytest

from cluster.config import EngineConfig
from cluster.coordinator.queue_speed import LONGEST_S, UNKNOWN_S, QueueSpeed
from cluster.transport.encoding import encode
from cluster.transport.messages import GenerateRequest, GenerateSummary, Probe, Refused
from tests.support.cluster import until
from tests.support.scripted import scripted_output
from workers.config import SchedulerConfig
from workers.scheduling.plan import SamplingParams, pack_i32
from workers.scheduling.waiting_queue import QueueLoad


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_speed_is_that_of_ended_tokens_while_someone_waits():
    clock = Clock()
    speed = QueueSpeed(clock)
    one = QueueLoad(num_requests=1, prompt_tokens=1000, max_output_tokens=1000)
    assert speed.wait_s(one) is None and speed.retry_after_s(one) == UNKNOWN_S
    speed.ended(10, 1000, someone_waits=False)
    for _ in range(11):
        speed.ended(60, 40, someone_waits=True)
        clock.now += 1.0
    # 1,000 tokens after the first end, in 11 s; answers have been of 40 tokens.
    assert speed.wait_s(QueueLoad(2, 107, 10_013)) == pytest.approx((107 + 2 * 40) * 11 / 1000)
    assert speed.wait_s(QueueLoad(2, 107, 20)) == pytest.approx((107 + 20) * 11 / 1000), "they may have 20 at most"
    assert speed.retry_after_s(QueueLoad(10, 10_000, 10)) == pytest.approx(1001 * 10 * 11 / 1000 / 2, rel=0.01)
    assert speed.retry_after_s(QueueLoad(1, 1, 1)) == 1.0
    assert speed.retry_after_s(QueueLoad(1, 10**6, 1)) == LONGEST_S
    speed.ended(10, 10, someone_waits=False)  # the queue is empty: what it was is no measure of what it can be
    assert speed.wait_s(one) is None


def _queue(bed, request_id, max_tokens=5, resumed=False):
    request = GenerateRequest(
        request_id,
        pack_i32([1, 2, 3, 4, 5]),
        SamplingParams(max_tokens=max_tokens),
        bed.ingress.endpoint,
        resumed=resumed,
    )
    bed.engine.send(encode(request))


def test_a_full_queue_takes_the_resumed_and_tells_others_when_to_come_again(make_bed):
    bed = make_bed(max_waiting=2)
    for request_id in ("a", "b", "c"):
        _queue(bed, request_id)
    refused = bed.notice()
    assert isinstance(refused, Refused) and (refused.request_id, refused.refusal.kind) == ("c", "queue_full")
    assert refused.refusal.retry_after_s == UNKNOWN_S
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
    bed.attach()
    for i in range(25):
        _queue(bed, f"q{i}", max_tokens=20)
    bed.ingress.read_end("q9")  # ten have ended, so the speed is known
    for i in range(25, 60):
        _queue(bed, f"q{i}", max_tokens=300)
    refusals = []
    while not refusals:
        notice = bed.notice()
        if isinstance(notice, Refused):
            refusals.append(notice.refusal)
    assert refusals[0].kind == "queue_full"
    assert 1.0 <= refusals[0].retry_after_s != UNKNOWN_S, "by the measured speed"


def test_who_would_wait_or_has_waited_too_long_is_refused(make_bed):
    bed = make_bed(queue_timeout_s=0.3)
    _queue(bed, "early")
    refused = bed.notice()
    assert (refused.request_id, refused.refusal.kind) == ("early", "queue_full")
    assert "waited 0.3 s in the queue (engine.queue_timeout_s)" in refused.refusal.message
    assert bed.coordinator.stats().num_waiting == 0
    _queue(bed, "resumed", resumed=True)
    until(lambda: bed.coordinator.stats().num_waiting == 1)
    bed.attach()
    assert bed.ingress.read_end("resumed").finish == "length"
    params = bed.generate("runs", max_tokens=300)  # more than 0.3 s; who runs may take long
    assert bed.ingress.read_end("runs").finish == "length"
    assert bed.ingress.tokens("runs") == scripted_output(5, params)


def test_a_probe_ends_like_a_request_and_runs_no_step(make_bed):
    bed = make_bed()
    bed.engine.send(encode(Probe("early", bed.ingress.endpoint)))
    refused = bed.notice()
    assert (refused.request_id, refused.refusal.kind) == ("early", "not_ready")
    assert refused.refusal.message == "the engine is starting"
    bed.attach()
    bed.engine.send(encode(Probe("p", bed.ingress.endpoint)))
    end = bed.ingress.read_end("p")
    assert (end.finish, end.tokens) == ("stop", ())
    assert bed.notice() == GenerateSummary("p", "stop", 0)
    assert bed.coordinator.stats().scheduler.num_steps == 0
    assert len(bed.coordinator.stats().heartbeat_age_s) == 2
