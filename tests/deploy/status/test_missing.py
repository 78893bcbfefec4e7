"""What a waiting placement group lacks."""

import pytest

from aerie.deploy.status.report import NodeRoom, missing, waiting_groups

GPU_NODE = NodeRoom({"CPU": 16, "GPU": 4}, {"CPU": 12, "GPU": 1})
FULL = NodeRoom({"CPU": 16, "GPU": 4}, {"CPU": 16, "GPU": 0})
CPU_NODE = NodeRoom({"CPU": 8}, {"CPU": 7.5})
RANK = {"CPU": 1, "GPU": 1}


@pytest.mark.parametrize(
    ("bundles", "strategy", "nodes", "said"),
    [
        ([RANK], "PACK", [GPU_NODE], ""),
        ([RANK], "PACK", [CPU_NODE], "no node has CPU 1, GPU 1; the largest has CPU 8, GPU 0"),
        ([RANK], "PACK", [], "no node has CPU 1, GPU 1; the largest has CPU 0, GPU 0"),
        ([RANK] * 8, "STRICT_PACK", [GPU_NODE, FULL], "no node has CPU 8, GPU 8; the largest has CPU 16, GPU 4"),
        ([RANK] * 2, "PACK", [GPU_NODE, FULL], "needs GPU 2, free 1 of 8"),
        ([RANK] * 2, "STRICT_PACK", [GPU_NODE, GPU_NODE], "no node has CPU 2, GPU 2 free: what is free is on several"),
        ([{"GPU": 0.3}] * 3, "SPREAD", [GPU_NODE], ""),
        ([RANK] * 2, "STRICT_SPREAD", [NodeRoom({"CPU": 4, "GPU": 4}, {"CPU": 4, "GPU": 4})], "needs 2 nodes, there"),
    ],
)
def test_what_is_missing_is_named(
    bundles: list[dict[str, float]], strategy: str, nodes: list[NodeRoom], said: str
) -> None:
    found = missing(bundles, strategy, nodes)
    assert found.startswith(said) and bool(found) == bool(said)


def test_only_groups_that_wait_are_listed_with_the_replica_that_they_are_for() -> None:
    def group(name: str, state: str) -> dict[str, object]:
        return {"name": name, "state": state, "strategy": "PACK", "bundles": {0: dict(RANK)}}

    table = {
        "a": group("SERVE_REPLICA::chat#Engine#x1", "PENDING"),
        "b": group("SERVE_REPLICA::chat#Engine#x2", "CREATED"),
        "c": group("", "RESCHEDULING"),
        "d": group("SERVE_REPLICA::old#Engine#x3", "REMOVED"),
    }
    first, second = waiting_groups(table, [CPU_NODE])
    assert (first.application, first.deployment, first.bundles) == ("chat", "Engine", ["CPU 1, GPU 1"])
    assert first.lacks.startswith("no node has") and (second.application, second.deployment) == ("", "")
