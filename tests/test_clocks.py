"""Durations and deadlines are measured by a clock that does not jump: the wall clock may be set at any time."""

import ast

from tests.support import ROOT

PACKAGES = ("kernels", "attention", "workers", "speculative", "cluster", "deploy")
# Modules that ask for the time of day, and why they may.
MAY_ASK = {
    "cluster/http/middleware.py": "a trace's times",
    "cluster/http/tracing.py": "a trace's times",
    "cluster/http/routes/models.py": "`created` of a model",
    "cluster/http/serving.py": "`created` of a reply",
    "cluster/ingress/adapter_changes.py": "stamps of adapter changes that ingresses compare",
    "cluster/http/routes/responses.py": "`created_at` of a reply",
    "cluster/start_log.py": "the steps of a start, by one clock of all processes",
    "cluster/replica/rank_process.py": "the steps of a start",
    "cluster/replica/worker_actor.py": "the steps of a start",
    "cluster/replica/worker_group.py": "the steps of a start",
    "cluster/replica/engine.py": "the steps of a start; an age that processes compare: a jump costs a second attempt",
    "deploy/serve/watches.py": "an age that processes compare: refusals of earlier starts",
    "deploy/offline/outputs.py": "`arrival_time` of vLLM's metrics",
    "deploy/status/bundle.py": "the times of a bundle's files and logs",
    "deploy/serve/address.py": "the steps of a start",
    "deploy/serve/console.py": "the steps of a start",
}


def test_only_listed_modules_ask_for_the_time_of_day() -> None:
    asking = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns"):
                    asking.add(str(path.relative_to(ROOT)))
    assert asking <= set(MAY_ASK), f"time.monotonic() for durations: {sorted(asking - set(MAY_ASK))}"
