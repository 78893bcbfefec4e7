"""docs/coming-from-vllm.md: every option of `vllm serve` that Aerie reads, and every metric that it names exists."""

import re

from aerie.cluster.http.metrics import declared_metrics, prometheus_text
from aerie.cluster.transport.messages import EngineStats
from aerie.deploy.config.keys import with_tables
from aerie.deploy.config.option_table import DECLARED
from aerie.workers.scheduling.stats import SchedulerStats
from tests.support import DOCS

PAGE = (DOCS / "coming-from-vllm.md").read_text()


def test_page_has_every_option() -> None:
    keys = with_tables((DOCS / "configuration.md").read_text())  # has Aerie's own
    assert not [option.flags[0] for option in DECLARED if f"`{option.flags[0]}" not in PAGE + keys]


def test_metrics_on_the_page_exist() -> None:
    declared = {m.name for kind in (EngineStats, SchedulerStats) for m in declared_metrics(kind).values()}
    served = declared | {"aerie:http_requests"} | set(re.findall(r"# TYPE (\S+)", prometheus_text([], "m").decode()))
    named = {name.removesuffix("_total") for name in re.findall(r"`((?:vllm|aerie):\w+)`", PAGE)}
    assert named and not named - {name.removesuffix("_total") for name in served}
