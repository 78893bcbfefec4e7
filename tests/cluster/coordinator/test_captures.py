"""Graphs that ranks capture while the coordinator serves, with scripted ranks in threads."""

import time

from aerie.workers.scheduling.plan import GraphCount
from tests.support.cluster import until
from tests.support.scripted import scripted_output


def bed_with_graphs(make_bed, num_waiting, interval_s=5.0, **options):
    bed = make_bed(**options)
    bed.scheduler.captures._interval_s = interval_s
    ranks = bed.new_ranks()
    for executor in ranks.executors:
        executor.graphs = GraphCount(3, num_waiting, missed_rows=1)
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 1)
    return bed, ranks.executors


def test_an_idle_engine_captures_all_and_says_so(make_bed):
    bed, executors = bed_with_graphs(make_bed, 20)
    until(lambda: bed.coordinator.stats().num_graphs == 23)
    assert bed.coordinator.stats().num_graphs_waiting == 0
    until(lambda: all(len(executor.capture_steps) == 20 for executor in executors))
    assert executors[0].capture_steps == executors[1].capture_steps == list(range(20))
    prompt = bed.generate("q", max_tokens=10)
    bed.ingress.read_end("q")
    assert bed.ingress.tokens("q") == scripted_output(5, prompt)[:10]


def test_requests_run_between_captures_and_all_ranks_capture_at_the_same_steps(make_bed):
    """Nobody loses a token, and captures neither starve nor come more often than configured."""
    interval_s = 0.05
    bed, executors = bed_with_graphs(make_bed, 10_000, interval_s, delay_s=0.002)
    bed.generate("first", max_tokens=200)
    until(lambda: bed.coordinator.stats().num_running == 1)
    before, begun_s = len(executors[0].capture_steps), time.monotonic()
    wanted = {f"q{i}": scripted_output(5, bed.generate(f"q{i}", seed=i, max_tokens=300)) for i in range(3)}
    for name in wanted:
        bed.ingress.read_end(name)
    elapsed_s, during = time.monotonic() - begun_s, len(executors[0].capture_steps) - before
    for name, tokens in wanted.items():
        assert bed.ingress.tokens(name) == tokens
    assert 0 < during <= elapsed_s / interval_s + 2
    bed.coordinator.stop()
    both = [executor.capture_steps for executor in executors]
    shorter = min(map(len, both))
    assert both[0][:shorter] == both[1][:shorter] and abs(len(both[0]) - len(both[1])) <= 1


def test_another_worker_group_is_asked_what_it_has(make_bed):
    bed, _ = bed_with_graphs(make_bed, 2)
    until(lambda: bed.coordinator.stats().num_graphs == 5)
    ranks = bed.new_ranks(2)
    for executor in ranks.executors:
        executor.graphs = GraphCount(1, 3)
    ranks.start()
    bed.coordinator.attach(ranks.endpoints, 2)
    until(lambda: bed.coordinator.stats().num_graphs == 4)
    assert bed.coordinator.stats().num_graphs_waiting == 0
