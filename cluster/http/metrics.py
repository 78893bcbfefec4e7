"""Prometheus text from the statistics of all engines: one sum per metric, under vLLM's names where vLLM has one.

Any ingress gives the same numbers, because they are the engines' and not its own: load-balanced scrapes and benchmark
tools that take differences would otherwise see counters jump. A counter falls only when an engine is replaced, which
Prometheus treats as a reset.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.transport.messages import EngineStats, Histogram

# EngineStats field, metric, help
COUNTERS = (
    ("prefix_queries", "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    ("prefix_hits", "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    ("num_preemptions", "vllm:num_preemptions", "Requests that gave their pages back and started again"),
    ("prompt_tokens", "vllm:prompt_tokens", "Prompt tokens of admitted requests"),
    ("generation_tokens", "vllm:generation_tokens", "Tokens generated"),
    ("num_drafts", "vllm:spec_decode_num_drafts", "Rounds that verified drafts"),
    ("num_draft_tokens", "vllm:spec_decode_num_draft_tokens", "Tokens drafted"),
    ("num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted"),
    ("num_steps", "aerie:steps", "Steps executed"),
    ("num_worker_restarts", "aerie:worker_restarts", "Times that an engine's workers were restarted"),
)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("vllm:", "From arrival to the first token"),
    "inter_token_latency_seconds": ("vllm:", "Between deliveries of tokens; one delivery may carry several"),
    "request_time_per_output_token_seconds": ("vllm:", "Mean time per token after the first, per request"),
    "e2e_request_latency_seconds": ("vllm:", "From arrival to the last token"),
    "request_queue_time_seconds": ("vllm:", "From arrival to the first step"),
    "request_prompt_tokens": ("vllm:", "Prompt tokens per request"),
    "request_generation_tokens": ("vllm:", "Tokens generated per request"),
    "step_seconds": ("aerie:", "Time of a step on rank 0"),
}
STATES = ("starting", "ready", "recovering", "draining", "dead")


def prometheus_text(engines: Sequence[EngineStats], model_name: str) -> bytes:
    """The text exposition format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(engines, model_name))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, engines: Sequence[EngineStats], model_name: str) -> None:
        self._engines = engines
        self._label = [model_name]

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        for name, metric, text in COUNTERS:
            yield self._counter(metric, text, sum(getattr(engine, name) for engine in self._engines))
        yield self._by(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Rounds that accepted the draft at a position",
            "position",
            _summed(dict(enumerate(e.accepted_per_position)) for e in self._engines),
        )
        yield self._by(
            "vllm:request_success",
            "Requests that ended",
            "finished_reason",
            _summed(engine.finished for engine in self._engines),
        )
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        engines = self._engines
        num_pages = sum(engine.num_pages for engine in engines)
        used = sum(engine.kv_usage * engine.num_pages for engine in engines)
        gauges = (
            ("vllm:num_requests_running", "Requests that decode", sum(e.num_running for e in engines)),
            ("vllm:num_requests_waiting", "Requests in the queue", sum(e.num_waiting for e in engines)),
            ("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1", used / num_pages if num_pages else 0.0),
            (
                "aerie:last_step_age_seconds",
                "Age of the last step, of the engine where it is oldest",
                max((e.last_step_age_s for e in engines), default=0.0),
            ),
        )
        for name, text, value in gauges:
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric(self._label, value)
            yield family
        states = Counter(engine.status for engine in engines)
        family = GaugeMetricFamily("aerie:engines", "Engines by state", labels=["model_name", "status"])
        for status in STATES:
            family.add_metric([*self._label, status], states[status])
        yield family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric(self._label, value)
        return family

    def _by(self, name: str, text: str, label: str, values: Counter[str]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([*self._label, key], value)
        return family

    def _histograms(self) -> Iterator[Metric]:
        for name, (prefix, text) in HISTOGRAMS.items():
            parts = [engine.histograms[name] for engine in self._engines if name in engine.histograms]
            if parts:
                family = HistogramMetricFamily(prefix + name, text, labels=["model_name"])
                family.add_metric(self._label, _buckets(parts), sum(part.total for part in parts))
                yield family


def _summed(parts: Iterable[dict[str, int] | dict[int, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in parts:
        for key, value in part.items():
            total[str(key)] += value
    return total


def _buckets(parts: Sequence[Histogram]) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound. While engines of two versions run, their bounds may differ: each observation
    then counts under its own engine's bound."""
    counts: Counter[float] = Counter()
    for part in parts:
        for bound, count in zip((*part.bounds, math.inf), part.counts, strict=True):
            counts[bound] += count
    cumulative, buckets = 0, []
    for bound in sorted(counts):
        cumulative += counts[bound]
        buckets.append(("+Inf" if math.isinf(bound) else str(bound), float(cumulative)))
    return buckets
