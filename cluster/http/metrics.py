"""Prometheus text from the statistics of all engines: one sum per metric. What there is, and under which name, is
declared at the numbers themselves, in `EngineStats` and `SchedulerStats`.

Any ingress gives the same numbers, because they are the engines' and not its own: load-balanced scrapes and benchmark
tools that take differences would otherwise see counters jump. A counter falls only when an engine is replaced, which
Prometheus treats as a reset. Only how requests ended is the ingress's own, and carries its id (`cluster.http.counts`).
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_type_hints

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from cluster.http.counts import RequestCounts
from cluster.transport.messages import EngineStats
from workers.scheduling.stats import Histogram, Metric, SchedulerStats

STATES = ("starting", "ready", "recovering", "draining", "dead")


def prometheus_text(engines: Sequence[EngineStats], model_name: str, counts: RequestCounts | None = None) -> bytes:
    """The text exposition format. counts: of the ingress that is asked."""
    registry = CollectorRegistry(auto_describe=False)
    if counts is not None:
        registry.register(_Requests(counts, model_name))
    registry.register(_Snapshot(engines, model_name))
    return generate_latest(registry)


@functools.cache
def declared_metrics(kind: type) -> dict[str, Metric]:
    """Field or property -> metric, of a class that annotates them with `Metric`."""
    hints = get_type_hints(kind, include_extras=True)
    for name, member in vars(kind).items():
        if isinstance(member, property) and member.fget is not None:
            hints[name] = get_type_hints(member.fget, include_extras=True).get("return")
    extras = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: extra for name, found in extras.items() for extra in found if isinstance(extra, Metric)}


class _Requests(Collector):
    def __init__(self, counts: RequestCounts, model_name: str) -> None:
        self._counts = counts
        self._model_name = model_name

    def collect(self) -> Iterator[Family]:
        labels = ["model_name", "ingress", "route", "status", "reason"]
        family = CounterMetricFamily("aerie:http_requests", "HTTP requests that ended at an ingress", labels=labels)
        for key, count in self._counts.by_route_status_reason().items():
            family.add_metric([self._model_name, self._counts.ingress, *key], count)
        yield family


class _Snapshot(Collector):
    def __init__(self, engines: Sequence[EngineStats], model_name: str) -> None:
        self._engines = engines
        self._label = [model_name]

    def collect(self) -> Iterator[Family]:
        schedulers = [engine.scheduler for engine in self._engines if engine.scheduler is not None]
        for kind, holders in ((EngineStats, self._engines), (SchedulerStats, schedulers)):
            for name, metric in declared_metrics(kind).items():
                values = [getattr(holder, name) for holder in holders]
                if metric.kind != "histogram":
                    yield self._family(metric, self._by_label(metric, values))
                elif values:
                    yield self._histogram(metric, values)
        states = Counter(engine.status for engine in self._engines)
        yield from self._of_ranks()
        of_engines = Metric("aerie:engines", "Engines by state", "gauge", label="status")
        yield self._family(of_engines, {status: states[status] for status in STATES})

    def _of_ranks(self) -> Iterator[Family]:
        """What each rank says of itself, by engine: a slow or silent one stands out."""
        labels = ["model_name", "engine", "rank"]
        age = GaugeMetricFamily("aerie:heartbeat_age_seconds", "Since a rank was last heard of", labels=labels)
        steps = CounterMetricFamily("aerie:rank_steps", "Steps that a rank has finished", labels=labels)
        seconds = CounterMetricFamily("aerie:rank_step_seconds", "Time that they took", labels=labels)
        for engine in self._engines:
            kinds = ((age, engine.heartbeat_age_s), (steps, engine.rank_steps), (seconds, engine.rank_step_s))
            for family, values in kinds:
                for rank, value in enumerate(values):
                    family.add_metric([*self._label, engine.engine_id, str(rank)], value)
        yield from (age, steps, seconds)

    def _by_label(self, metric: Metric, values: Sequence[Any]) -> Mapping[str, float]:
        """All engines' numbers as one, by label; under "" if the metric has none."""
        if metric.label:
            return _summed(values)
        if metric.across == "max":
            return {"": max(values, default=0.0)}
        if metric.across == "mean":
            pages = [engine.num_pages for engine in self._engines]
            weighed = sum(value * weight for value, weight in zip(values, pages, strict=True))
            return {"": weighed / sum(pages) if sum(pages) else 0.0}
        return {"": sum(values)}

    def _family(self, metric: Metric, values: Mapping[str, float]) -> Family:
        labels = ["model_name", *([metric.label] if metric.label else [])]
        kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
        family = kind(metric.name, metric.help, labels=labels)
        for key, value in values.items():
            family.add_metric([*self._label, *([key] if metric.label else [])], value)
        return family

    def _histogram(self, metric: Metric, parts: Sequence[Histogram]) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=["model_name"])
        family.add_metric(self._label, _buckets(parts), sum(part.total for part in parts))
        return family


def _summed(parts: Sequence[Mapping[str, int] | Sequence[int]]) -> Counter[str]:
    """By key, or by position."""
    total: Counter[str] = Counter()
    for part in parts:
        for key, value in part.items() if isinstance(part, Mapping) else enumerate(part):
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
