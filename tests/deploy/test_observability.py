"""Dashboard and alert rules name what /metrics exports, and the page of alerts has what the rules point to.

Prometheus' own checker is used where it is installed (`promtool check rules`)."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from aerie.cluster.http.metrics import RequestCounts, prometheus_text
from aerie.cluster.transport.messages import EngineStats
from aerie.workers.scheduling.stats import SchedulerStats
from tests.support import DOCS, ROOT

FOLDER = ROOT / "deploy" / "observability"
ALERTS = FOLDER / "alerts.yaml"
_SELECTOR = re.compile(r"\b((?:aerie|vllm):[a-z_]+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"\s*([a-z_]+)\s*(?:=~|!~|!=|=)\s*\"[^\"]*\"\s*")
_GROUPED = re.compile(r"\bby \(([a-z_, ]+)\)")


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Labels by the name of each series that an engine with a draft and an ingress export."""
    counts = RequestCounts()
    counts.count("/v1/completions", 429, "server_overloaded")
    stats = SchedulerStats(accepted_histogram=[3, 2, 1])
    stats.count_finished("stop")
    stats.count_rounds("tree", 3, "measured")
    stats.expected_tokens_per_ms["tree"] = 1.0
    engine = EngineStats("e", "ready", heartbeat_age_s=(0.1,), rank_steps=(5,), rank_step_s=(0.2,), scheduler=stats)
    text = prometheus_text([engine], "m", counts).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def _rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from group["rules"]


def _queries() -> Iterator[str]:
    for rule in _rules():
        yield rule["expr"]
    for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def test_queries_name_series_and_labels_that_exist(exported: dict[str, set[str]]) -> None:
    for query in _queries():
        found = list(_SELECTOR.finditer(query))
        assert found, query
        for name, matchers in ((match.group(1), match.group(2)) for match in found):
            assert name in exported, f"{name} of {query}"
            for matcher in filter(None, (matchers or "").split(", ")):
                parsed = _MATCHER.fullmatch(matcher)
                assert parsed is not None, f"{matcher} of {query}"
                assert parsed.group(1) in exported[name], f"{matcher} of {query}"
        labels = {label for match in found for label in exported[match.group(1)]}
        for grouped in _GROUPED.finditer(query):
            assert set(grouped.group(1).split(", ")) <= labels, query


def test_queries_are_balanced_and_rate_counters_only(exported: dict[str, set[str]]) -> None:
    for query in _queries():
        for left, right in ("()", "{}", "[]"):
            assert query.count(left) == query.count(right), query
        for match in re.finditer(r"(?:rate|increase)\(([a-z_:]+)", query):
            assert match.group(1).endswith(("_total", "_bucket", "_sum", "_count")), query


def test_every_alert_has_severity_summary_and_a_heading_of_its_own() -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / "alerts.md").read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    names = [rule["alert"] for rule in _rules()]
    assert len(set(names)) == len(names)
    for rule in _rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert re.fullmatch(r"[0-9]+[sm]", rule.get("for", "0s"))
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["runbook"].removeprefix("docs/alerts.md#") in anchors, rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_the_rules() -> None:
    subprocess.run(["promtool", "check", "rules", str(ALERTS)], check=True, timeout=60)


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    board = json.loads((FOLDER / "dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


def test_files_are_in_the_wheel() -> None:
    assert '"observability/*"' in (ROOT / "pyproject.toml").read_text()
    assert {path.name for path in Path(FOLDER).iterdir()} == {"alerts.yaml", "dashboard.json"}
