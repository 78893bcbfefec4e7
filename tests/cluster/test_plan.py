"""Values of "auto" before the processes of an application start, and the plan's way to them."""

from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from aerie.cluster.config import AerieConfig, ConfigError, parse, read_args
from aerie.cluster.placement import NodeResources
from aerie.cluster.plan import CORES_FOR_TWO, Plan, RankPlan, resolve, resolve_rank
from tests.support import ROOT


def config_of(folder: Path, **args: Any) -> AerieConfig:
    model = folder / "name-of-model"
    model.mkdir(exist_ok=True)
    if not (model / "config.json").exists():
        (model / "config.json").write_text("{}")
    return parse({"model": {"path": str(model)} | args.pop("model", {})} | args, folder)


def plan_of(folder: Path, device: Literal["cpu", "cuda"] = "cpu", num_cpus: float = 4, **args: Any) -> Plan:
    return resolve(config_of(folder, **args), 2048, nodes_of(device, num_cpus))


def nodes_of(device: Literal["cpu", "cuda"] = "cpu", num_cpus: float = 4) -> list[NodeResources]:
    return [NodeResources("n", "10.0.0.1", num_cpus, 8.0 if device == "cuda" else 0.0)]


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
    own = plan_of(tmp_path).ingress.config
    assert (own.served_model_name, own.max_model_len) == ("name-of-model", 2048)
    asked = plan_of(tmp_path, ingress={"served_model_name": "other", "max_model_len": 200}).ingress.config
    assert (asked.served_model_name, asked.max_model_len) == ("other", 200)


def test_ingress_and_engine_of_a_plan_have_one_identity_and_other_models_another(tmp_path: Path) -> None:
    def found(**args: Any) -> str:
        plan = plan_of(tmp_path, **args)
        assert plan.replica.identity == plan.ingress.identity
        return plan.replica.identity

    first = found()
    assert found(ingress={"retry_after_s": 3.0}, engine={"queue_timeout_s": 9.0}) == first
    assert found(model={"seed": 1}) != first
    assert resolve(config_of(tmp_path), 1024, nodes_of()).replica.identity != first
    (tmp_path / "name-of-model" / "tokenizer.json").write_text("{}")
    assert found() != first


def test_ranks_that_start_before_ray_are_those_of_the_plan(tmp_path: Path) -> None:
    """A rank that was started before Serve is attached by an equal plan, which has travelled as Serve's arguments."""
    ahead = resolve_rank(config_of(tmp_path), 2048, "cpu")
    for changes in ({}, {"ingress": {"max_n": 4}}, {"engine": {"drain_timeout_s": 1.0}}):
        plan = plan_of(tmp_path, num_cpus=64, **changes)
        assert Plan.from_args(plan.to_args()).replica.rank == ahead
    assert ahead != plan_of(tmp_path, engine={"threads_per_worker": ahead.threads + 1}).replica.rank
    assert ahead != plan_of(tmp_path, "cuda").replica.rank


@pytest.mark.parametrize("path", sorted((ROOT / "deploy").glob("*.yaml")), ids=lambda path: path.stem)
def test_plans_and_configurations_are_the_same_where_they_arrive(path: Path, tmp_path: Path) -> None:
    args = dict(read_args(path))
    for section in {"model", "speculative"} & args.keys():
        (tmp_path / section).mkdir()
        (tmp_path / section / "config.json").write_text("{}")
        args[section] = {**args[section], "path": section}
    args["parallel"] = args.get("parallel", {}) | {"replicas": {"min": 1, "max": 2}}
    args["ingress"] = args.get("ingress", {}) | {"api_keys": ["a-key-of-somebody"]}
    config = parse(args, tmp_path)
    assert AerieConfig.model_validate_json(config.model_dump_json()) == config
    plan = resolve(config, 1000, nodes_of("cuda", 64))
    sent = yaml.safe_dump(plan.to_args())
    assert Plan.from_args(yaml.safe_load(sent)) == plan and "a-key-of-somebody" not in sent


def test_what_does_not_fit_has_no_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="parallel.tensor_parallel=16: an engine needs"):
        plan_of(tmp_path, parallel={"tensor_parallel": 16})


def test_a_rank_has_a_device(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(AssertionError, match="resolve"):
        RankPlan(config.worker, config.speculative, config.draft_attention, 1, "text")
