"""What "auto" becomes before the processes of an application start."""

from pathlib import Path
from typing import Any, Literal

import pytest

from cluster.config import AerieConfig, parse
from cluster.plan import CORES_FOR_TWO, Plan, RankPlan, resolve


def config_of(folder: Path, **args: Any) -> AerieConfig:
    model = folder / "name-of-model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    return parse({"model": {"path": str(model)} | args.pop("model", {})} | args, folder)


def plan_of(folder: Path, device: Literal["cpu", "cuda"] = "cpu", num_cpus: float = 4, **args: Any) -> Plan:
    return resolve(config_of(folder, **args), device, num_cpus, one_node=True)


@pytest.mark.parametrize(
    "num_cpus,wanted,expected",
    [(CORES_FOR_TWO, "auto", 2), (CORES_FOR_TWO - 1, "auto", 1), (1, 3, 3), (64, 1, 1)],
)
def test_a_second_ingress_where_there_are_cores(tmp_path: Path, num_cpus: int, wanted: object, expected: int) -> None:
    assert plan_of(tmp_path, num_cpus=num_cpus, ingress={"num_replicas": wanted}).num_ingresses == expected


@pytest.mark.parametrize(
    "device,wanted,expected",
    [("cuda", "auto", True), ("cpu", "auto", False), ("cpu", True, True), ("cuda", False, False)],
)
def test_spare_workers_where_ranks_use_gpus(
    tmp_path: Path, device: Literal["cpu", "cuda"], wanted: object, expected: bool
) -> None:
    plan = plan_of(tmp_path, device, engine={"spare_workers": wanted})
    assert plan.replica.has_spare_workers == expected
    assert plan.replica.rank.uses_gpus == (device == "cuda")
    assert plan.replica.rank.worker.model.device == device


def test_an_ingress_knows_the_name_and_the_length_of_its_model(tmp_path: Path) -> None:
    own = plan_of(tmp_path, model={"max_model_len": 300}).ingress.config
    assert (own.served_model_name, own.max_model_len) == ("name-of-model", 300)
    wanted = {"served_model_name": "other", "max_model_len": 200}
    asked = plan_of(tmp_path, model={"max_model_len": 300}, ingress=wanted).ingress.config
    assert (asked.served_model_name, asked.max_model_len) == ("other", 200)


def test_ranks_are_equal_whatever_the_ingress_and_the_limits_of_time_are(tmp_path: Path) -> None:
    """A rank that was started before Serve is adopted by an equal plan, which Serve's process makes anew."""
    rank = plan_of(tmp_path).replica.rank
    assert rank == plan_of(tmp_path, num_cpus=64, ingress={"max_n": 4}, engine={"drain_timeout_s": 1.0}).replica.rank
    assert rank != plan_of(tmp_path, engine={"threads_per_worker": 2}).replica.rank
    assert rank != plan_of(tmp_path, "cuda").replica.rank


def test_a_rank_has_a_device(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(AssertionError, match="resolve"):
        RankPlan(config.worker, config.speculative, config.draft_attention, 1, "text")
