"""An update of the only engine, and of the only ingress, under load: requests wait. The ranks are scripted."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.scripted_rank import SlowEngine
from tests.e2e.serving import Server, engine_stats, serving
from tests.e2e.test_replicas import Load

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


def _args(**engine: Any) -> dict[str, Any]:
    return {
        "model": {"path": "target", "device": "cpu"},
        "parallel": {"tensor_parallel": 1},
        "ingress": {"num_replicas": 1},
        "engine": engine,
    }


@pytest.fixture(scope="module")
def server(ray_port: int, folder: Path) -> Iterator[Server]:
    with serving(ray_port, _args(drain_timeout_s=1.0), folder, scripted=True) as running:
        yield running


def test_an_update_of_the_only_engine_and_ingress_fails_no_request(server: Server, folder: Path) -> None:
    from ray import serve

    from aerie.deploy.app import application
    from aerie.deploy.checks import planned
    from aerie.deploy.nodes import cluster_nodes

    before = {stats.engine_id for stats in engine_stats()}
    plan = planned(_args(drain_timeout_s=1.0, queue_timeout_s=200.0), cluster_nodes(), folder)
    plan = dataclasses.replace(
        plan,
        ingress=dataclasses.replace(plan.ingress, config=dataclasses.replace(plan.ingress.config, retry_after_s=3.0)),
    )
    with Load(server, 12) as load:
        load.wait(24)
        serve.run(application(plan, SlowEngine), name="aerie", route_prefix="/")
        load.wait(48)
    assert not load.wrong
    assert not {stats.engine_id for stats in engine_stats() if stats.status == "ready"} & before
