"""Step costs measured on a GPU: by graphs where they exist, in bounded time, without effect on requests."""

import dataclasses

import pytest

from aerie.speculative.build import EngineSpec, local_engine, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import SchedulerConfig
from aerie.workers.runner.build import PhaseReport
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import SamplingParams
from tests.support.embedded import CHAIN, TREE, embedded_spec
from tests.support.engine_plans import build_worker
from tests.support.prompts import held_out_prompts, tokenized

pytestmark = pytest.mark.gpu


def on_gpu(speculative: SpeculativeConfig | None, measure_costs: bool = True, tensor_parallel: int = 1) -> EngineSpec:
    spec = embedded_spec(speculative, tensor_parallel, debug=False)
    worker = dataclasses.replace(
        spec.worker,
        model=dataclasses.replace(spec.worker.model, device="cuda", dtype="float32"),
        scheduler=SchedulerConfig(max_running=24),
        measure_costs=measure_costs,
    )
    return dataclasses.replace(spec, worker=worker)


def built(spec: EngineSpec, report: PhaseReport) -> Worker:
    return build_worker(spec, plan_engine(spec), report)


@pytest.mark.parametrize("speculative", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_costs_rise_with_what_a_step_holds_and_take_little_time(speculative: SpeculativeConfig | None) -> None:
    phases: dict[str, float] = {}
    costs = built(on_gpu(speculative), phases.__setitem__).costs
    assert costs is not None and phases["costs measured"] < 2.5
    default = costs.mixed_shapes[0]
    assert costs.rounds[default].num_requests == (1, 2, 4, 8, 16, 24)
    assert costs.chunk_requests == (0, 1, 8, 17, 24)  # from 17 on a step is padded to 24
    assert costs.chunk_tokens[:3] == (16, 17, 64) and costs.chunk_tokens[-1] == 2048
    assert 0 < costs.round_ms(default, 1) <= costs.round_ms(default, 24) < 100
    assert costs.step_ms(default, 0, 0, 16) < costs.step_ms(default, 0, 0, 512) < costs.step_ms(default, 0, 0, 2048)
    assert costs.step_ms(default, 24, 0, 1024) > costs.step_ms(default, 24, 0, 16)


@pytest.mark.parametrize("speculative", [None, TREE], ids=["plain", "tree"])
def test_answers_are_as_if_nothing_had_been_measured(speculative: SpeculativeConfig | None) -> None:
    """But for near ties: with costs, prompts are cut otherwise."""
    found = []
    for measure_costs in (False, True):
        with local_engine(on_gpu(speculative, measure_costs)) as engine:
            requests = engine.generate(tokenized(held_out_prompts(40)), SamplingParams(60, 1.0, seed=3), 13)
        found.append([request.output for request in requests])
    assert sum(a != b for a, b in zip(*found, strict=True)) <= 1


@pytest.mark.gpu(2)
def test_two_ranks_measure_one_table() -> None:
    """`aerie.workers.runner.local_engine` compares theirs."""
    with local_engine(on_gpu(CHAIN, tensor_parallel=2)) as engine:
        assert engine.executor.costs is not None
        assert len(engine.generate(tokenized(held_out_prompts(8)), SamplingParams(8, 0.0))) == 8
