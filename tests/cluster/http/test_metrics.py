"""A series for each engine, under the names that vLLM's tools read."""

from prometheus_client.parser import text_string_to_metric_families

from aerie.cluster.http.metrics import RequestCounts, declared_metrics, prometheus_text
from aerie.cluster.transport.messages import EngineStats
from aerie.workers.scheduling.stats import Histogram, SchedulerStats

# What Prometheus calls the metrics, their types and labels besides the model's and the engine's.
EXPORTED = {
    "aerie:draft_version": "gauge",
    "aerie:draft_gain_ratio": "gauge",
    "aerie:draft_candidates": "counter",
    "aerie:draft_rollbacks": "counter",
    "aerie:learned_texts": "counter",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "aerie:prefix_cache_recomputed_tokens": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter finished_reason",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter position",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:cache_config_info": "gauge block_size enable_prefix_caching",
    "aerie:late_masks": "counter",
    "aerie:steps": "counter",
    "aerie:requests_resumed": "counter",
    "aerie:spec_decode_accepted_tokens_by_branch": "counter branch",
    "aerie:shape_tokens": "counter shape",
    "aerie:shape_steps": "counter shape",
    "aerie:shape_reasons": "counter reason",
    "aerie:shape_expected_tokens_per_ms": "gauge shape",
    "aerie:worker_restarts": "counter",
    "aerie:step_seconds": "histogram",
    "aerie:last_step_age_seconds": "gauge",
    "aerie:cuda_graphs": "gauge",
    "aerie:cuda_graphs_waiting": "gauge",
    "aerie:adapter_draft_rounds": "counter",
    "aerie:adapter_accepted_tokens": "counter",
    "aerie:dead_drafts": "gauge",
    "aerie:backlog_seconds": "gauge",
    "aerie:slot_wait_seconds": "gauge",
    "aerie:engines": "gauge status",
    "aerie:heartbeat_age_seconds": "gauge rank",
    "aerie:rank_steps": "counter rank",
    "aerie:rank_step_seconds": "counter rank",
}


def _values(*engines: EngineStats) -> dict[tuple[str, ...], float]:
    """(sample name, values of its labels other than the model's) -> value."""
    text = prometheus_text(engines, "m").decode()
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            values[(sample.name, *labels.values())] = sample.value
    return values


def test_each_engine_has_its_series() -> None:
    one = EngineStats(
        "a",
        "ready",
        num_running=2,
        num_waiting=1,
        prefix_queries=90,
        prefix_hits=30,
        num_draft_tokens=30,
        num_worker_restarts=1,
        heartbeat_age_s=(0.25, 7.5),
        rank_steps=(70, 69),
        rank_step_s=(1.5, 3.0),
        scheduler=SchedulerStats(
            prompt_tokens=100,
            generation_tokens=50,
            num_preemptions=1,
            finished={"stop": 3, "length": 1},
            accepted_histogram=[0, 5, 3, 2],
            num_steps=70,
            accepted_by_branch={"dspark": 12, "suffix": 5},
            tokens_by_shape={"plain": 4, "3/1/4": 9},
            steps_by_shape={"plain": 4, "3/1/4": 3},
            steps_by_reason={"best": 6, "probe": 1},
            expected_tokens_per_ms={"plain": 0.25, "3/1/4": 0.5},
        ),
    )
    two = EngineStats(
        "b",
        "recovering",
        num_running=3,
        num_draft_tokens=5,
        scheduler=SchedulerStats(
            prompt_tokens=1,
            generation_tokens=2,
            finished={"stop": 1, "abort": 2},
            accepted_histogram=[0, 0, 0, 0, 1],
            tokens_by_shape={"plain": 2},
            expected_tokens_per_ms={"plain": 0.5},
        ),
    )
    values = _values(one, two, EngineStats("c", "starting"))
    expected = {
        ("vllm:num_requests_running", "a"): 2,
        ("vllm:num_requests_running", "b"): 3,
        ("vllm:num_requests_running", "c"): 0,
        ("vllm:num_requests_waiting", "a"): 1,
        ("vllm:prompt_tokens_total", "a"): 100,
        ("vllm:prompt_tokens_total", "b"): 1,
        ("vllm:generation_tokens_total", "b"): 2,
        ("vllm:prefix_cache_queries_total", "a"): 90,
        ("vllm:prefix_cache_hits_total", "a"): 30,
        ("vllm:num_preemptions_total", "a"): 1,
        ("vllm:request_success_total", "a", "stop"): 3,
        ("vllm:request_success_total", "a", "length"): 1,
        ("vllm:request_success_total", "b", "stop"): 1,
        ("vllm:request_success_total", "b", "abort"): 2,
        ("vllm:spec_decode_num_drafts_total", "a"): 10,
        ("vllm:spec_decode_num_draft_tokens_total", "a"): 30,
        ("vllm:spec_decode_num_draft_tokens_total", "b"): 5,
        ("vllm:spec_decode_num_accepted_tokens_total", "a"): 17,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "a", "0"): 10,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "a", "2"): 2,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "b", "3"): 1,
        ("aerie:engines", "ready"): 1,
        ("aerie:engines", "starting"): 1,
        ("aerie:engines", "recovering"): 1,
        ("aerie:engines", "dead"): 0,
        ("aerie:steps_total", "a"): 70,
        ("aerie:spec_decode_accepted_tokens_by_branch_total", "suffix", "a"): 5,
        ("aerie:spec_decode_accepted_tokens_by_branch_total", "dspark", "a"): 12,
        ("aerie:shape_tokens_total", "a", "plain"): 4,
        ("aerie:shape_tokens_total", "b", "plain"): 2,
        ("aerie:shape_steps_total", "a", "3/1/4"): 3,
        ("aerie:shape_reasons_total", "a", "probe"): 1,
        ("aerie:shape_expected_tokens_per_ms", "b", "plain"): 0.5,
        ("aerie:worker_restarts_total", "a"): 1,
        ("aerie:heartbeat_age_seconds", "a", "1"): 7.5,
        ("aerie:rank_steps_total", "a", "1"): 69,
        ("aerie:rank_step_seconds_total", "a", "0"): 1.5,
    }
    assert {key: values[key] for key in expected} == expected
    assert ("vllm:prompt_tokens_total", "c") not in values, "it has no scheduler yet"


def test_lines_are_spelt_as_benchmark_tools_read_them() -> None:
    text = prometheus_text(
        [EngineStats("a", "ready", scheduler=SchedulerStats(accepted_histogram=[1, 1]))], "m"
    ).decode()
    assert '\nvllm:spec_decode_num_drafts_total{engine="a",model_name="m"} 2.0\n' in text
    assert '\nvllm:spec_decode_num_accepted_tokens_per_pos_total{engine="a",model_name="m",position="0"} 1.0\n' in text


def test_every_metric_is_exported_under_its_name_with_its_type_and_label() -> None:
    by_shape = ("tokens_by_shape", "steps_by_shape", "expected_tokens_per_ms")
    by_label = ("finished", "steps_by_reason", "accepted_by_branch", *by_shape)
    stats = SchedulerStats(**{name: {"one": 1} for name in by_label}, accepted_histogram=[0, 1])
    ranks = {"heartbeat_age_s": (0.0,), "rank_steps": (1,), "rank_step_s": (0.1,)}
    cache = {"block_size": "16", "enable_prefix_caching": "True"}
    engine = EngineStats("a", "ready", scheduler=stats, num_pages=1, cache_config=cache, **ranks)
    found = {}
    for family in text_string_to_metric_families(prometheus_text([engine], "m").decode()):
        labels = set().union(*(sample.labels for sample in family.samples)) - {"model_name", "engine", "le"}
        found[family.name] = " ".join([family.type, *sorted(labels)])
        assert family.documentation
    assert found == EXPORTED


def test_an_ingress_tells_how_many_choices_requests_want() -> None:
    counts = RequestCounts()
    for number in (1, 1, 4):
        counts.choices.observe(number)
    text = prometheus_text([EngineStats("a", "ready", cache_config={"block_size": "16"})], "m", counts).decode()
    lines = text.splitlines()
    label = f'ingress="{counts.ingress}",'
    assert f'vllm:request_params_n_bucket{{{label}le="2.0",model_name="m"}} 2.0' in lines
    assert f'vllm:request_params_n_count{{{label[:-1]},model_name="m"}} 3.0' in lines
    assert 'vllm:cache_config_info{block_size="16",engine="a",model_name="m"} 1.0' in lines


def test_histograms_are_cumulative() -> None:
    declared = {name: m.name for name, m in declared_metrics(SchedulerStats).items() if m.kind == "histogram"}
    histograms = {name: Histogram((0.1, 1.0), [1, 2, 3], 7.5) for name in declared}
    values = _values(*(EngineStats(name, "ready", scheduler=SchedulerStats(**histograms)) for name in "ab"))
    for metric in declared.values():
        assert [values[f"{metric}_bucket", "b", bound] for bound in ("0.1", "1.0", "+Inf")] == [1, 3, 6]
        assert (values[f"{metric}_count", "a"], values[f"{metric}_sum", "a"]) == (6, 7.5)


def test_an_engine_without_a_scheduler_has_no_series_of_one() -> None:
    names = {name for name, *_ in _values(EngineStats("a", "dead"))}
    assert "vllm:num_requests_running" in names and "vllm:generation_tokens_total" not in names
