"""Hybrids on a GPU: answers are a CPU's, captured steps are eager ones, and a round is one launch without copies."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
import torch

from aerie.speculative.build import EngineSpec, local_engine, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.bench.models import hybrids
from tests.bench.prompts import random_prompts
from tests.bench.round import Setting, engine_spec, write_checkpoints
from tests.bench.trace import figures, profile, start
from tests.speculative.conftest import Pair
from tests.speculative.test_backends import RefuseHostReads, step_of
from tests.speculative.test_hybrid_rounds import make_pair
from tests.support.engine_plans import build_worker
from tests.support.kernels.gpu_waits import refuse_gpu_waits

pytestmark = pytest.mark.gpu
MODELS = ("qwen3.5-27b", "qwen3.5-35b-a3b")
SHAPES = ("plain", "chain", "tree")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("hybrid"), "Qwen3_5")


def of_shape(pair: Pair, shape: str) -> SpeculativeConfig | None:
    return {"plain": None, "chain": pair.chain(), "tree": pair.tree()}[shape]


def on_gpu(spec: EngineSpec, graphs: bool = True, dtype: Literal["float32", "bfloat16"] = "float32") -> EngineSpec:
    model = dataclasses.replace(spec.worker.model, device="cuda", dtype=dtype)
    worker = dataclasses.replace(spec.worker, model=model, cuda_graphs=graphs, debug=False)
    return dataclasses.replace(spec, worker=worker)


def answers(spec: EngineSpec, pair: Pair, sampling: SamplingParams) -> list[Request]:
    with local_engine(spec) as engine:
        return engine.generate(pair.prompts, sampling, 6)


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_those_of_a_cpu(hybrid: Pair, shape: str) -> None:
    """In float32: sums in another order, which a near tie of 240 tokens may show."""
    sampling = SamplingParams(24, 0.0)
    expected = answers(hybrid.spec(), hybrid, sampling)
    found = answers(on_gpu(hybrid.spec(of_shape(hybrid, shape))), hybrid, sampling)
    assert sum(a.output != b.output for a, b in zip(found, expected, strict=True)) <= 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_emit_what_eager_steps_emit(hybrid: Pair, shape: str, temperature: float) -> None:
    spec, sampling = hybrid.spec(of_shape(hybrid, shape)), SamplingParams(40, temperature, seed=3)
    eager, graphed = (answers(on_gpu(spec, graphs), hybrid, sampling) for graphs in (False, True))
    assert sum(a.output != b.output for a, b in zip(eager, graphed, strict=True)) <= 1


def small(name: str, shape: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    """An engine of four layers of a real model's sizes, dummy weights and three requests."""
    few = {"num_hidden_layers": 4, "vocab_size": 32768}
    monkeypatch.setitem(hybrids.CONFIGS, name, hybrids.CONFIGS[name] | few)
    monkeypatch.setattr("tests.bench.models.configured.CONFIGS", dict(hybrids.CONFIGS))
    write_checkpoints(folder, name)
    return engine_spec(folder, shape, 3, Setting(), 1, cuda_graphs=True)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_is_one_launch_and_waits_for_nothing(
    name: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small(name, shape, tmp_path, monkeypatch)
    with local_engine(spec) as engine:
        start(engine, random_prompts(spec.worker.model, 3, 512), 256)
        seen = figures(profile(engine, 10), 10)
    assert seen["graph_launches"] == 1 and seen["copies_to_host"] <= 1  # the result, which nothing waits for
    eager = dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, cuda_graphs=False))
    worker = build_worker(eager, plan_engine(eager))
    with refuse_gpu_waits(), RefuseHostReads():
        for index in range(len(worker._strategy.shapes)):
            step_of(worker, index)
    torch.cuda.empty_cache()
