"""The coordinator over real ZeroMQ sockets, with scripted ranks in threads."""

import time

import msgspec
import pytest

from aerie.cluster.coordinator import loop, state_publisher
from aerie.cluster.coordinator.request_streams import Stream
from aerie.cluster.http.metrics import declared_metrics
from aerie.cluster.transport.encoding import BadMessageError
from aerie.cluster.transport.messages import Abort, Subscribe
from aerie.cluster.transport.sockets import Transport, new_keys
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.stats import SchedulerStats
from tests.support.cluster import until
from tests.support.scripted import scripted_output


def test_tokens_and_ends_reach_the_ingress(make_bed):
    bed = make_bed()
    bed.attach()
    wanted = {f"q{i}": scripted_output(5, bed.generate(f"q{i}", seed=i, max_tokens=10 + i)) for i in range(7)}
    ends = {name: bed.ingress.read_end(name) for name in wanted}
    for name, tokens in wanted.items():
        assert bed.ingress.tokens(name) == tokens
        assert ends[name].finish == "length" and ends[name].error is None
        assert ends[name].speculation.num_rounds == sum(ends[name].speculation.histogram) > 0
        assert ends[name].speculation.num_draft_tokens == 5


def test_one_message_a_step_carries_all_of_an_ingresss_tokens(make_bed):
    bed = make_bed(delay_s=0.01)
    for i in range(4):
        bed.generate(f"q{i}", seed=i, max_tokens=30)
    until(lambda: bed.coordinator.stats().num_waiting == 4)
    bed.attach()
    for i in range(4):
        bed.ingress.read_end(f"q{i}")
    # One more may have said that they were queued.
    assert bed.ingress.num_batches <= bed.coordinator.stats().scheduler.num_steps + 4


def test_requests_that_cannot_be_taken_are_refused_with_the_reason(make_bed):
    bed = make_bed(max_waiting=1)
    bed.generate("long", max_tokens=500)
    refusal = bed.ingress.read_refusal("long")
    assert refusal.kind == "too_large" and "the limit is 400" in refusal.message
    bed.generate("first", max_tokens=3)
    bed.generate("second", max_tokens=3)
    assert bed.ingress.read_refusal("second").kind == "queue_full"
    bed.generate("first", max_tokens=3)
    assert bed.ingress.read_refusal("first").kind == "queue_full"
    bed.attach()
    assert bed.ingress.read_end("first").finish == "length"


def test_a_message_that_is_none_does_not_end_the_loop(make_bed):
    bed = make_bed()
    bed.attach()
    for raw in (b"nonsense", b"G\xc1", b""):
        bed.ingress.socket.send(raw)
    bed.generate("q", max_tokens=3)
    assert bed.ingress.read_end("q").finish == "length"


def test_an_abort_ends_the_request_and_unknown_ones_are_ignored(make_bed):
    bed = make_bed(delay_s=0.01)
    bed.attach()
    bed.generate("q", max_tokens=300)
    assert bed.ingress.read()
    bed.ingress.send(Abort("unknown"))
    bed.ingress.send(Abort("q"))
    assert bed.ingress.read_end("q").finish == "abort"
    assert bed.coordinator.stats().scheduler.finished == {"abort": 1}
    until(lambda: bed.coordinator.stats().kv_usage == 0)


def test_an_ingress_aborts_its_own_requests_only(make_bed):
    bed = make_bed(delay_s=0.01)
    bed.attach()
    bed.generate("q", max_tokens=30)
    assert bed.ingress.read()
    other = bed.new_ingress()
    other.send(Abort("q"))
    bed.generate("q", ingress=other)
    assert other.read_refusal("q").kind == "too_large"  # read after the abort
    assert bed.ingress.read_end("q").finish == "length"
    other.close()


@pytest.mark.parametrize("is_running", [True, False])
def test_an_ingress_that_leaves_takes_its_requests_with_it_and_no_others(make_bed, is_running):
    bed = make_bed(delay_s=0.01)
    other = bed.new_ingress()
    other.send(Subscribe())
    bed.generate("theirs", max_tokens=300, ingress=other)
    while "theirs" not in other.deltas:
        assert other.read()
    bed.generate("ours", max_tokens=30)
    if is_running:
        bed.attach()
        while not other.tokens("theirs"):
            assert other.read()
    other.close()
    until(lambda: bed.coordinator.stats().scheduler.finished.get("abort") == 1)
    if not is_running:
        assert bed.coordinator.stats().num_waiting == 1
        bed.attach()
    assert bed.ingress.read_end("ours").finish == "length"


def test_an_ingress_that_does_not_read_loses_its_requests_holds_up_nobody_and_is_told(make_bed, monkeypatch):
    """What it reads later ends at the gap: it cannot take the rest for a whole answer."""
    monkeypatch.setattr("aerie.cluster.transport.channel._INGRESS_HIGH_WATER", 3)
    bed = make_bed()
    bed.attach()
    other = bed.new_ingress()
    other.send(Subscribe())
    # The kernel buffers some 200 KB besides, so it takes several requests with logprobs to fill the way.
    for i in range(12):
        bed.generate(f"theirs{i}", max_tokens=390, prompt_len=2, ingress=other, seed=i, logprobs=0)
    until(lambda: bed.coordinator.stats().scheduler.finished.get("abort", 0) > 0, 60)
    bed.generate("ours", max_tokens=3)
    assert bed.ingress.read_end("ours").finish == "length"
    with pytest.raises(BadMessageError, match="was lost"):
        while other.read():
            pass
    assert any(seen[-1].finish is None for seen in other.deltas.values())
    other.close()


def test_draining_refuses_new_requests_and_waits_for_the_rest(make_bed):
    bed = make_bed(delay_s=0.01)
    bed.attach()
    bed.generate("q", max_tokens=60)
    bed.ingress.read()
    assert not bed.coordinator.drain(timeout_s=0.01)
    bed.generate("late")
    assert bed.ingress.read_refusal("late").kind == "not_ready"
    assert bed.coordinator.drain(timeout_s=10)
    assert bed.ingress.read_end("q").finish == "length"
    assert bed.coordinator.stats().status == "draining"


def test_what_outlasts_a_drain_can_be_failed_with_a_reason(make_bed):
    bed = make_bed(delay_s=0.01)
    bed.attach()
    for name in ("q0", "q1"):
        bed.generate(name, max_tokens=300)
    while len(bed.ingress.deltas) < 2:  # one that came while it drains would be refused
        assert bed.ingress.read()
    assert not bed.coordinator.drain(timeout_s=0.05)
    bed.coordinator.fail_all("too slow")
    assert {bed.ingress.read_end(name).error for name in ("q0", "q1")} == {"too slow"}
    assert bed.coordinator.drain(timeout_s=10)


def test_a_bug_that_one_request_meets_ends_only_that_one(make_bed, monkeypatch):
    bed = make_bed()
    put = Stream.put

    def broken(stream, output, num_draft_tokens, version):
        if stream.request_id == "bad":
            raise KeyError("surprise")
        put(stream, output, num_draft_tokens)

    monkeypatch.setattr(Stream, "put", broken)
    bed.generate("bad")
    good = bed.generate("good", seed=1)
    bed.attach()
    assert "KeyError: 'surprise'" in bed.ingress.read_end("bad").error
    bed.ingress.read_end("good")
    assert bed.ingress.tokens("good") == scripted_output(5, good)


def test_the_death_of_the_loop_is_reported_not_swallowed(make_bed, monkeypatch):
    bed = make_bed()
    bed.generate("q")
    until(lambda: bed.coordinator.stats().num_waiting == 1)

    def broken():
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(bed.scheduler, "schedule", broken)
    bed.attach()
    until(lambda: bool(bed.deaths))
    assert "ZeroDivisionError: a bug of ours" in bed.deaths[0] and "Traceback" in bed.deaths[0]
    assert "a bug of ours" in bed.ingress.read_end("q").error
    until(lambda: not bed.coordinator._thread.is_alive())
    assert bed.coordinator.stats().status == "dead"
    with pytest.raises(RuntimeError, match="does not run \\(status: dead\\)"):
        bed.coordinator.detach("too late")


def test_stopping_tells_the_ranks_and_fails_what_is_left(make_bed):
    bed = make_bed(delay_s=0.01)
    ranks = bed.attach()
    bed.generate("q", max_tokens=300)
    bed.ingress.read()
    bed.coordinator.stop()
    assert bed.ingress.read_end("q").error == "the engine was stopped"
    ranks.join()
    assert set(ranks.ends) == {"stopped"}
    bed.coordinator.stop()


def test_a_turn_that_stops_the_loop_tells_nobody_of_its_state_any_more(make_bed, monkeypatch):
    monkeypatch.setattr(state_publisher, "PERIOD_S", 0.0)
    monkeypatch.setattr(loop, "HOUSEKEEPING_S", 0.0)  # something is to be told in every turn
    bed = make_bed()
    bed.ingress.send(Subscribe())
    assert bed.ingress.read()
    bed.coordinator.stop()
    assert bed.deaths == [] and bed.coordinator.stats().status == "starting"


def test_an_idle_coordinator_does_not_spin(make_bed):
    bed = make_bed()
    bed.attach()
    bed.generate("q", max_tokens=3)
    bed.ingress.read_end("q")
    started = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - started < 0.2, "coordinator and two ranks used CPU while idle"


def test_everything_works_over_tcp_with_curve(make_bed):
    bed = make_bed(transport=Transport(node_ip="127.0.0.1", keys=new_keys()))
    assert bed.coordinator.endpoint.startswith("tcp://127.0.0.1:")
    ranks = bed.attach()
    params = bed.generate("q", max_tokens=50)
    bed.ingress.read_end("q")
    assert bed.ingress.tokens("q") == scripted_output(5, params)
    ranks.kill(0)
    bed.generate("again")
    until(lambda: bool(bed.lost))
    assert bed.lost[0].startswith("rank 0 is gone")


def test_a_snapshot_of_the_statistics_stays_as_it_was(make_bed):
    bed = make_bed()
    bed.attach()
    before = bed.coordinator.stats()
    bed.generate("q", max_tokens=20)
    bed.ingress.read_end("q")
    assert before.scheduler == SchedulerStats(accepted_histogram=[0] * 4)
    assert bed.coordinator.stats().scheduler.generation_tokens == 20


def test_statistics_fill_every_histogram_that_the_edge_exports(make_bed):
    bed = make_bed()
    bed.attach()
    bed.generate("q", max_tokens=20)
    bed.ingress.read_end("q")
    stats = bed.coordinator.stats()
    counted = stats.scheduler
    assert (stats.engine_id, counted.finished) == ("e1", {"length": 1})
    assert (counted.prompt_tokens, counted.generation_tokens) == (5, 20)
    # The prompt's last chunk drafts too, and the drafts of the last round are never verified.
    assert stats.num_draft_tokens == 5 * (counted.num_drafts + 1) > 5
    assert stats.cache_config["block_size"] == "4" and stats.cache_config["num_gpu_blocks"] == "200"
    observed = [name for name, metric in declared_metrics(SchedulerStats).items() if metric.kind == "histogram"]
    assert len(observed) == 13
    for name in observed:
        histogram = getattr(counted, name)
        assert len(histogram.counts) == len(histogram.bounds) + 1 and sum(histogram.counts) >= 1
    assert counted.iteration_tokens.total == 5 + 20 and sum(counted.iteration_tokens.counts) == counted.num_steps
    assert (counted.request_max_tokens.total, counted.request_max_generation_tokens.total) == (20, 20)
    legs_s = counted.queue_s.total + counted.prefill_s.total + counted.decode_s.total
    assert legs_s == pytest.approx(counted.e2e_s.total)


def test_the_scheduler_hears_what_steps_cost_with_every_worker_group(make_bed):
    bed = make_bed()
    costs = CostTable((RoundCosts((1,), (4.0,), (0.0,)),) * 2, (0,), (16,), ((5.0,),), (1,))
    slower = msgspec.structs.replace(costs, chunk_ms=((7.0,),))
    heard = []
    bed.scheduler.use_costs = heard.append
    bed.attach(1, costs=costs)
    bed.attach(2)  # one that measured nothing: what was known stays
    bed.attach(3, costs=slower)
    assert heard == [costs, slower]


@pytest.mark.parametrize("with_costs, num_pending", [(True, 1), (False, 2)])
def test_with_costs_the_next_plan_is_held_while_a_step_runs(make_bed, with_costs, num_pending):
    """So that a request that comes is in the next step."""
    step_ms = 40.0
    bed = make_bed(delay_s=step_ms / 1000)
    ranks = bed.new_ranks(num_ranks=1).start()
    costs = RoundCosts((1,), (step_ms,), (0.0,))
    table = CostTable((costs, costs), (0, 1), (1, 32), ((step_ms,) * 2,) * 2, (1, 1))
    bed.coordinator.attach(ranks.endpoints, 1, table if with_costs else None)
    bed.generate("q", max_tokens=120)
    for _ in range(5):
        assert bed.ingress.read()
    seen = []
    while bed.coordinator.stats().num_running and seen.count(num_pending) < 40:
        seen.append(ranks.executors[0].num_pending)
        time.sleep(0.005)
    assert seen.count(num_pending) > 10
    # plans are sent shortly before a step of 40 ms ends, sooner if steps vary
    assert not with_costs or seen.count(1) > seen.count(2)
    assert bed.ingress.read_end("q").finish == "length"


def test_a_wall_clock_that_jumps_by_an_hour_changes_nothing(make_bed, monkeypatch):
    bed = make_bed(delay_s=0.002)
    bed.attach()
    wanted = scripted_output(5, bed.generate("q", max_tokens=250))
    until(lambda: bed.coordinator.stats().num_running == 1)
    now = time.time
    for jump_s in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: now() + jump_s)
        time.sleep(0.2)
        assert bed.coordinator.stats().status == "ready"
    bed.ingress.read_end("q")
    assert bed.ingress.tokens("q") == wanted and bed.lost == bed.deaths == []
