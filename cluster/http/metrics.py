"""Prometheus text from the statistics of all engines, one series per engine, and one log line and counts for each
request that ended at this ingress. The fields of `EngineStats` and `SchedulerStats` declare the metrics.

Every ingress returns the engines' numbers, not its own: otherwise load-balanced scrapes, and tools that take
differences, would see counters jump. A replaced engine gets a new id and new series, so sums of rates over engines do
not jump. Only counts of requests, filled by `aerie.cluster.http.middleware` and `aerie.cluster.http.serving`, are of
one ingress, and their series carry its id. A load-balanced scrape reaches one ingress; a sum of rates over ingresses is
right if each is scraped at least twice in the range.
"""

import functools
import itertools
import logging
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from starlette.types import Scope

from aerie.cluster.http.errors import RATE_LIMITED
from aerie.cluster.http.tenants import tenant_of
from aerie.cluster.start_log import REQUEST_LOG, fields
from aerie.cluster.transport.messages import EngineStats
from aerie.workers.scheduling.stats import Histogram, Metric, SchedulerStats

CLIENT_LEFT = "client_left"
OTHER = "other"
_KEY = "reason"
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)  # as vLLM's


@dataclass
class KeyUsage:
    """Totals of one API key at this ingress.

    requests: generation requests that ended, whatever their status.
    limited: those refused by the key's own limits.
    prompt_tokens, cached_tokens, output_tokens: counts over requests that reached an engine; cached tokens are prompt
        tokens, too.
    """

    requests: int = 0
    limited: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class RequestCounts:
    """Counts of this ingress's requests, by route, status and reason.

    ingress: a random id of this ingress.
    choices: histogram of `n` of generation requests.
    by_key: usage of each configured key, by its name.
    """

    def __init__(self) -> None:
        self.ingress = uuid.uuid4().hex[:8]
        self._routes: Collection[str] = ()
        self.by_key: dict[str, KeyUsage] = {}
        self.choices = Histogram.empty(_CHOICES)
        self._ended: Counter[tuple[str, str, str]] = Counter()

    def count_separately(self, routes: Collection[str]) -> None:
        """Count these routes separately; all others count together, because clients choose paths."""
        self._routes = frozenset(routes)

    def count(self, path: str, status: int, reason: str) -> None:
        """Count one request. status: 0 if the client disconnected before a status was sent. reason: "" for success."""
        route = path if path in self._routes else OTHER
        self._ended[route, str(status), reason] += 1

    def by_route_status_reason(self) -> Mapping[tuple[str, str, str], int]:
        """Return the counts so far."""
        return self._ended


def set_reason(scope: Scope, reason: str | None) -> None:
    """Set why the request of `scope` ends: an error's code, or CLIENT_LEFT. Streams may set it after their status was
    sent."""
    scope.setdefault("state", {})[_KEY] = reason or OTHER


def reason_of(scope: Scope) -> str:
    """Return the reason set last; "" without one."""
    reason: str = scope.get("state", {}).get(_KEY, "")
    return reason


_KEY_METRICS = {
    "requests": "Generation requests of an API key that ended at an ingress",
    "limited": "Generation requests refused by the key's own limits",
    "prompt_tokens": "Prompt tokens of an API key's requests",
    "cached_tokens": "Those found in the prefix cache",
    "output_tokens": "Tokens generated for an API key",
}
STATES = ("starting", "ready", "recovering", "draining", "dead")


def prometheus_text(
    engines: Sequence[EngineStats], model_name: str, counts: RequestCounts | None = None, keys: Collection[str] = ()
) -> bytes:
    """Return the text exposition format. counts: counts of this ingress. keys: keys whose usage is shown."""
    registry = CollectorRegistry(auto_describe=False)
    if counts is not None:
        registry.register(_Requests(counts, model_name, keys))
    registry.register(_Snapshot(engines, model_name))
    return generate_latest(registry)


@functools.cache
def declared_metrics(kind: type) -> dict[str, Metric]:
    """Return field or property -> metric, for a class that annotates them with `Metric`."""
    hints = get_type_hints(kind, include_extras=True)
    for name, member in vars(kind).items():
        if isinstance(member, property) and member.fget is not None:
            hints[name] = get_type_hints(member.fget, include_extras=True).get("return")
    extras = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: extra for name, metadata in extras.items() for extra in metadata if isinstance(extra, Metric)}


class _Requests(Collector):
    def __init__(self, counts: RequestCounts, model_name: str, keys: Collection[str]) -> None:
        self._counts = counts
        self._keys = keys
        self._model_name = model_name

    def collect(self) -> Iterator[Family]:
        labels = ["model_name", "ingress", "route", "status", "reason"]
        family = CounterMetricFamily("aerie:http_requests", "HTTP requests that ended at an ingress", labels=labels)
        for key, count in self._counts.by_route_status_reason().items():
            family.add_metric([self._model_name, self._counts.ingress, *key], count)
        yield family
        choices = HistogramMetricFamily("vllm:request_params_n", "n of requests", labels=["model_name", "ingress"])
        choices.add_metric(
            [self._model_name, self._counts.ingress], _buckets(self._counts.choices), self._counts.choices.total
        )
        yield choices
        for name, meaning in _KEY_METRICS.items():
            usage_of_keys = CounterMetricFamily(f"aerie:key_{name}", meaning, labels=["model_name", "ingress", "key"])
            for tenant, usage in self._counts.by_key.items():
                if tenant in self._keys:
                    usage_of_keys.add_metric([self._model_name, self._counts.ingress, tenant], getattr(usage, name))
            yield usage_of_keys


class _Snapshot(Collector):
    """Prometheus metrics of the engines' statistics at one time."""

    def __init__(self, engines: Sequence[EngineStats], model_name: str) -> None:
        self._engines = engines
        self._model_name = model_name

    def collect(self) -> Iterator[Family]:
        for name, metric in declared_metrics(EngineStats).items():
            yield self._family(metric, {engine.engine_id: getattr(engine, name) for engine in self._engines})
        schedulers = {engine.engine_id: engine.scheduler for engine in self._engines if engine.scheduler is not None}
        for name, metric in declared_metrics(SchedulerStats).items():
            yield self._family(metric, {engine_id: getattr(stats, name) for engine_id, stats in schedulers.items()})
        yield from self._rank_metrics()
        yield self._cache_metrics()
        states = Counter(engine.status for engine in self._engines)
        engines = GaugeMetricFamily("aerie:engines", "Engines by state", labels=["model_name", "status"])
        for status in STATES:
            engines.add_metric([self._model_name, status], states[status])
        yield engines

    def _cache_metrics(self) -> Family:
        """A configuration as vLLM exports it: in the labels, with value 1."""
        configs = {engine.engine_id: engine.cache_config for engine in self._engines if engine.cache_config}
        names = sorted({name for config in configs.values() for name in config})
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Configuration of the KV cache", labels=["model_name", "engine", *names]
        )
        for engine_id, config in configs.items():
            family.add_metric([self._model_name, engine_id, *(config.get(name, "") for name in names)], 1)
        return family

    def _rank_metrics(self) -> Iterator[Family]:
        """Per-rank series: a slow or silent rank stands out."""
        labels = ["model_name", "engine", "rank"]
        age = GaugeMetricFamily("aerie:heartbeat_age_seconds", "Since a rank was last heard of", labels=labels)
        steps = CounterMetricFamily("aerie:rank_steps", "Steps that a rank has finished", labels=labels)
        seconds = CounterMetricFamily("aerie:rank_step_seconds", "Time that they took", labels=labels)
        for engine in self._engines:
            kinds = ((age, engine.heartbeat_age_s), (steps, engine.rank_steps), (seconds, engine.rank_step_s))
            for family, values in kinds:
                for rank, value in enumerate(values):
                    family.add_metric([self._model_name, engine.engine_id, str(rank)], value)
        yield from (age, steps, seconds)

    def _family(self, metric: Metric, values: Mapping[str, Any]) -> Family:
        """Return a metric's Prometheus family. values: its value for each engine."""
        labels = ["model_name", "engine", *([metric.label] if metric.label else [])]
        if metric.kind == "histogram":
            family = HistogramMetricFamily(metric.name, metric.help, labels=labels)
            for engine_id, histogram in values.items():
                family.add_metric([self._model_name, engine_id], _buckets(histogram), histogram.total)
            return family
        kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
        numbers = kind(metric.name, metric.help, labels=labels)
        for engine_id, value in values.items():
            for key, number in _keyed(value) if metric.label else [("", value)]:
                numbers.add_metric([self._model_name, engine_id, *([key] if metric.label else [])], number)
        return numbers


def _keyed(values: Mapping[str, float] | Sequence[float]) -> Iterator[tuple[str, float]]:
    """Yield values by key, or by position."""
    for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        yield str(key), value


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return cumulative counts by upper bound."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(histogram.counts)), strict=True))


_LOG_KEY = "tokens"
logger = logging.getLogger(REQUEST_LOG)


@dataclass(frozen=True)
class RequestTokens:
    """Tokens of a request that reached an engine.

    cached: prompt tokens found in the prefix cache, among `prompt`.
    finish: why its choices ended, separated by commas.
    """

    prompt: int
    cached: int
    output: int
    finish: str


def set_tokens(scope: Scope, tokens: RequestTokens) -> None:
    """Set the tokens of the request of `scope`."""
    scope["state"][_LOG_KEY] = tokens


def log_generation(scope: Scope, counts: RequestCounts, status: int, reason: str, seconds: float) -> None:
    """Log and count a generation request that has ended. reason: an error's code; "" for success."""
    key = tenant_of(scope).name
    tokens: RequestTokens = scope["state"].get(_LOG_KEY, RequestTokens(0, 0, 0, ""))
    if key in counts.by_key:
        usage = counts.by_key[key]
        usage.requests += 1
        usage.limited += reason == RATE_LIMITED
        usage.prompt_tokens += tokens.prompt
        usage.cached_tokens += tokens.cached
        usage.output_tokens += tokens.output
    logger.info(
        "request %s ended",
        scope["state"]["request_id"],
        extra=fields(
            path=scope["path"],
            status=status,
            reason=reason,
            seconds=round(seconds, 3),
            key=key,
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            output_tokens=tokens.output,
            finish=tokens.finish,
        ),
    )
