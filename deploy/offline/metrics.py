"""Metrics of an engine as plain values, named as vLLM's reader names them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families


@dataclass
class Metric:
    """A metric's name and labels."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: float = 0


@dataclass
class Gauge(Metric):
    """A number that may fall."""

    value: float = 0.0


@dataclass
class Histogram(Metric):
    """buckets: cumulative counts by upper bound."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def metrics_of(text: str) -> list[Metric]:
    """Return the metrics of Prometheus' text format."""
    return [metric for family in text_string_to_metric_families(text) for metric in _metrics(family)]


def _metrics(family: Family) -> Iterator[Metric]:
    if family.type != "histogram":
        kind = Counter if family.type == "counter" else Gauge
        yield from (kind(family.name, dict(each.labels), each.value) for each in family.samples)
        return
    found: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        metric = found.setdefault(tuple(labels.items()), Histogram(family.name, labels))
        if sample.name.endswith("_bucket"):
            metric.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_sum"):
            metric.sum = sample.value
        elif sample.name.endswith("_count"):
            metric.count = int(sample.value)
    yield from found.values()
