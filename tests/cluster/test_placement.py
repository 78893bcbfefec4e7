"""Placement: what fits is placed, what can never fit is refused with the cluster's totals."""

from pathlib import Path
from typing import Any

import pytest

from aerie.cluster.config import AerieConfig, ConfigError, parse
from aerie.cluster.placement import NodeResources, order_ranks, place


def _config(tmp_path: Path, device: str = "auto", **parallel: Any) -> AerieConfig:
    (tmp_path / "config.json").write_text("{}")
    return parse({"model": {"path": str(tmp_path), "device": device}, "parallel": parallel}, tmp_path)


def _nodes(*each: tuple[float, float]) -> list[NodeResources]:
    return [NodeResources(f"id{n}", f"10.0.0.{n}", cpus, gpus) for n, (cpus, gpus) in enumerate(each)]


def test_two_ranks_fit_a_two_core_laptop(tmp_path: Path) -> None:
    placement = place(_config(tmp_path, tensor_parallel=2), _nodes((2, 0)))
    assert placement.device == "cpu" and placement.strategy == "STRICT_PACK"
    assert len(placement.bundles) == 3 and all("GPU" not in bundle for bundle in placement.bundles)


def test_each_rank_gets_a_gpu_where_there_are_gpus(tmp_path: Path) -> None:
    placement = place(_config(tmp_path, tensor_parallel=4), _nodes((32, 4)))
    assert placement.device == "cuda"
    assert [bundle.get("GPU", 0) for bundle in placement.bundles] == [0, 1, 1, 1, 1]


def test_ranks_spread_over_nodes_only_if_no_node_holds_them(tmp_path: Path) -> None:
    nodes = _nodes((16, 2), (16, 2))
    assert place(_config(tmp_path, tensor_parallel=2), nodes).strategy == "STRICT_PACK"
    assert place(_config(tmp_path, tensor_parallel=4), nodes).strategy == "PACK"


def test_impossible_tensor_parallel_names_the_totals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        place(_config(tmp_path, tensor_parallel=8), _nodes((16, 2), (16, 4)))
    text = str(error.value)
    assert text.startswith("parallel.tensor_parallel=8: an engine needs 4.2 CPU and 8 GPU, but the cluster has 2 nodes")
    assert "32 CPU and 6 GPU" in text and "lower parallel.tensor_parallel" in text


def test_strict_pack_over_two_nodes_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"on one node \(STRICT_PACK\).*or set parallel.strategy to PACK"):
        place(_config(tmp_path, tensor_parallel=4, strategy="STRICT_PACK"), _nodes((16, 2), (16, 2)))


def test_too_many_replicas_say_how_many_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.replicas=3: only 2 fit.*lower it to 2"):
        place(_config(tmp_path, tensor_parallel=2, replicas=3), _nodes((16, 4)))


def test_autoscaling_waits_instead_of_refusing(tmp_path: Path) -> None:
    config = _config(tmp_path, device="cuda", tensor_parallel=8, autoscaling=True)
    assert place(config, _nodes((4, 0))).device == "cuda"


def test_cuda_without_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.device='cuda': the cluster has 1 node with 4 CPU and 0 GPU"):
        place(_config(tmp_path, device="cuda"), _nodes((4, 0)))


def test_auto_leaves_one_node_only_for_replicas_that_would_not_fit(tmp_path: Path) -> None:
    nodes = _nodes((16, 4), (16, 2), (16, 2))
    assert place(_config(tmp_path, tensor_parallel=4), nodes).strategy == "STRICT_PACK"
    assert place(_config(tmp_path, tensor_parallel=4, replicas=2), nodes).strategy == "PACK"


def test_spread_ranks_are_on_nodes_of_their_own_and_the_first_beside_the_engine(tmp_path: Path) -> None:
    config = _config(tmp_path, tensor_parallel=2, strategy="STRICT_SPREAD")
    placement = place(config, _nodes((1, 0), (1, 0)))
    assert placement.strategy == "STRICT_SPREAD"
    assert [round(bundle["CPU"], 6) for bundle in placement.bundles] == [0.7, 0.5]
    with pytest.raises(
        ConfigError, match=r"needs 1\.2 CPU on 2 nodes \(STRICT_SPREAD\).*or set parallel.strategy to PACK"
    ):
        place(config, _nodes((8, 0)))


def test_spread_engines_are_counted_by_nodes(tmp_path: Path) -> None:
    def config(replicas: int) -> AerieConfig:
        return _config(tmp_path, tensor_parallel=2, strategy="STRICT_SPREAD", replicas=replicas)

    nodes = _nodes((16, 1), (16, 3), (16, 2))
    assert place(config(3), nodes).device == "cuda"
    with pytest.raises(ConfigError, match=r"parallel\.replicas=4: only 3 fit"):
        place(config(4), nodes)


def test_ranks_of_one_node_are_neighbours_and_the_coordinators_node_is_first() -> None:
    nodes = {0: "b", 1: "a", 2: "b", 3: "a", 4: "b", 5: "c"}
    assert order_ranks(nodes, 5, {}) == [2, 4, 1, 3, 5]


def test_further_nodes_follow_by_address_round_from_the_first() -> None:
    nodes = {0: "n3", 1: "n9", 2: "n3", 3: "n1", 4: "n10", 5: "unknown"}
    addresses = {"n1": "10.0.0.1", "n3": "10.0.0.3", "n9": "10.0.0.9", "n10": "10.0.0.10"}
    assert order_ranks(nodes, 5, addresses) == [2, 1, 4, 5, 3]


def test_spread_rank_may_share_bundle_0_with_the_engine() -> None:
    assert order_ranks({0: "b", 1: "a", 2: "c"}, 3, {"a": "10.0.0.9", "b": "10.0.0.2", "c": "10.0.0.3"}) == [0, 2, 1]
