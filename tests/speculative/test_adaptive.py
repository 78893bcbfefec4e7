"""Shapes that change while requests run: the same answers as without drafts, and every step a graph."""

import dataclasses
import itertools
from contextlib import AbstractContextManager

import pytest
import torch
from msgspec.structs import replace

from aerie.speculative.build import EngineSpec, local_engine, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import GraphCapture, RoundShapes, SchedulerConfig
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.runner import local_engine as engines
from aerie.workers.runner.batch import StepBatch, StepTensors
from aerie.workers.runner.decoding import FillMasks
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.graphs.graph_keys import CHUNK_NEEDS, bucket_sizes
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.cost_table import CostTable, RoundCosts
from aerie.workers.scheduling.plan import SamplingParams, StepPlan, StepResult, unpack_i32
from aerie.workers.scheduling.request import Request, RequestOutput
from tests.speculative.conftest import EOS, Pair
from tests.support.engine_plans import as_captured
from tests.support.kernels.eager_graphs import LazyRecorder

GREEDY = SamplingParams(44, 0.0, stop_token_ids=(EOS,))
RANDOM = replace(GREEDY, temperature=0.9, seed=11)
MIX = (GREEDY, RANDOM, replace(RANDOM, top_p=0.8, seed=12), replace(GREEDY, speculative=False))
RARE = replace(GREEDY, frequency_penalty=0.3, max_tokens=20)
TOKENS = (8, 64)


def cheap(shapes: RoundShapes, favourite: int) -> CostTable:
    """Costs by which one shape is the best, whatever is accepted."""
    rounds = tuple(
        RoundCosts((1, 16), (1.0, 1.0) if index == favourite else (9.0, 9.0), (0.0, 0.0))
        for index in range(len(shapes))
    )
    return CostTable(rounds, (0,), (16,), ((1.0,),), (shapes.default,))


def answers(engine: engines.LocalEngine, prompts: list[list[int]], with_rare: bool = False) -> list[list[int]]:
    """Requests come in three waves, so that prompts run beside rounds. The costs change every two steps, if the engine
    has several shapes."""
    scheduler = engine.scheduler
    shapes = scheduler._shapes
    requests = [Request(f"r{i}", prompt, MIX[i % len(MIX)]) for i, prompt in enumerate(prompts)]
    if with_rare:
        requests[-1] = Request("rare", prompts[-1], RARE)
    favourites = itertools.cycle(range(len(shapes)))
    waiting = requests[::-1]
    for step in itertools.count():
        if step % 13 == 0:
            for _ in range(min(5, len(waiting))):
                scheduler.submit(waiting.pop())
        if step % 2 == 0 and shapes.adaptive:
            scheduler.use_costs(cheap(shapes, next(favourites)))
        engine.step()
        if not waiting and scheduler.num_running == scheduler.num_waiting == engine.executor.num_pending == 0:
            return [request.output for request in requests]
    raise AssertionError


def spec(pair: Pair, speculative: SpeculativeConfig | None) -> EngineSpec:
    return pair.spec(speculative, scheduler=SchedulerConfig(max_running=10, max_step_tokens=64))


def graph_engine(spec: EngineSpec) -> AbstractContextManager[engines.LocalEngine]:
    """An engine that chooses as where steps are captured: among what has graphs."""
    return engines.local_engine(spec.worker, as_captured(plan_engine(spec)))


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[list[int]]:
    with local_engine(spec(pair, None)) as engine:
        return answers(engine, pair.prompts, with_rare=True)


@pytest.mark.parametrize("shape", [pytest.param("chain", marks=pytest.mark.slow), "tree"])
def test_answers_do_not_change_when_shapes_do(pair: Pair, plain: list[list[int]], shape: str) -> None:
    speculative = pair.chain() if shape == "chain" else pair.tree()
    with graph_engine(spec(pair, speculative)) as engine:
        assert answers(engine, pair.prompts, with_rare=True) == plain
        stats, shapes = engine.scheduler.stats, engine.scheduler._shapes
    assert len(shapes) == (3 if shape == "chain" else 4)
    assert set(stats.steps_by_shape) == {s.name for s in shapes.shapes}
    assert all(tokens >= stats.steps_by_shape[name] for name, tokens in stats.tokens_by_shape.items())
    assert {"best", "prompts", "sampling"} <= set(stats.steps_by_reason)
    assert set(stats.expected_tokens_per_ms) == set(stats.steps_by_shape)
    accepted = sum(k * n for k, n in enumerate(stats.accepted_histogram))
    assert stats.num_draft_tokens > accepted > 0.2 * stats.num_drafts
    with local_engine(spec(pair, dataclasses.replace(speculative, adaptive=False))) as engine:
        assert answers(engine, pair.prompts, with_rare=True) == plain
        assert set(engine.scheduler.stats.steps_by_reason) <= {"static", "not_wanted"}


@pytest.mark.slow  # adaptive trees without captures: `test_cost_probe`
@pytest.mark.parametrize("shape", [pytest.param("chain", marks=pytest.mark.slow), "tree"])
def test_where_nothing_is_captured_any_shape_runs_beside_prompts(
    pair: Pair, plain: list[list[int]], shape: str
) -> None:
    speculative = pair.chain() if shape == "chain" else pair.tree()
    with local_engine(spec(pair, speculative)) as engine:
        assert answers(engine, pair.prompts, with_rare=True) == plain
        stats, shapes = engine.scheduler.stats, engine.scheduler._shapes
    assert set(stats.steps_by_reason) <= {"best", "probe", "not_wanted"}
    assert set(stats.steps_by_shape) == {s.name for s in shapes.shapes}


def test_where_nothing_is_captured_a_step_verifies_no_more_than_was_drafted(pair: Pair) -> None:
    """A larger shape is drafted first, and verified in the next step. Before, the first step of a tree after rounds
    without drafts verified one token in sixteen rows: on the embedded pair, 3 to 4 % of the time."""
    speculative = pair.tree()
    with local_engine(spec(pair, speculative)) as engine:
        shapes, plans, submit = engine.scheduler._shapes, list[StepPlan](), engine.executor.submit

        def noted(plan: StepPlan) -> None:
            plans.append(plan)
            submit(plan)

        engine.executor.submit = noted  # type: ignore[method-assign]
        answers(engine, pair.prompts[:6])
    assert len({plan.shape for plan in plans}) == len(shapes)
    widths = [(shapes[last.next_shape].width, shapes[plan.shape].width) for last, plan in itertools.pairwise(plans)]
    assert [i for i, (drafted, verified) in enumerate(widths) if verified > drafted] == []
    assert any(plan.next_shape > plan.shape for plan in plans if plan.slots)


@pytest.mark.parametrize("shape", ["chain", pytest.param("tree", marks=pytest.mark.slow)])
def test_every_step_is_a_graph_whatever_shape_is_chosen(pair: Pair, shape: str) -> None:
    """All rounds, and all steps with prompt chunks that are captured for any shape."""
    speculative = pair.chain() if shape == "chain" else pair.tree()
    prompts = pair.prompts + [prompt[::-1] for prompt in pair.prompts[:2]]
    with graph_engine(spec(pair, speculative)) as engine:
        expected = answers(engine, prompts)
    with graph_engine(spec(pair, speculative)) as engine:
        worker, recorder = engine.executor, LazyRecorder()
        assert isinstance(worker, Worker)
        graphs = GraphedDecoding(worker._strategy, worker._slots, bucket_sizes(10), 256, recorder, TOKENS)
        with torch.inference_mode():
            graphs.capture(GraphCapture(limit_s=1e9), SOLO)
        worker._strategy = graphs
        eager: list[StepBatch] = []
        seen: set[tuple[int, bool]] = set()
        step = graphs.step

        def noted(batch: StepBatch, fill_masks: FillMasks | None = None) -> StepTensors:
            before = recorder.num_replays
            out = step(batch, fill_masks)
            if recorder.num_replays == before:
                eager.append(batch)
            seen.add((batch.shape, batch.chunks is not None))
            if batch.num_requests:
                assert out.min_entropies is not None
                assert (out.min_entropies >= 0).sum() == batch.num_requests and len(out.min_entropies) == len(
                    out.counts
                )
            return out

        graphs.step = noted  # type: ignore[method-assign]
        assert answers(engine, prompts) == expected
        shapes = engine.scheduler._shapes
    assert {shape for shape, with_chunks in seen if not with_chunks} == set(range(len(shapes)))
    assert (shapes.default, True) in seen
    for batch in eager:
        assert batch.chunks is not None, f"a round of shape {batch.shape} ran without a graph"
        assert not CHUNK_NEEDS.covers(batch.needs) or batch.chunks.batch.num_rows > max(TOKENS)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_every_round_tells_the_targets_min_entropy(pair: Pair, tensor_parallel: int) -> None:
    """Results have the min-entropy of the distribution that a round's first token is chosen from: for every shape, with
    and without prompts beside the rounds."""
    asking = spec(pair, pair.tree())
    asking = dataclasses.replace(asking, worker=dataclasses.replace(asking.worker, tensor_parallel=tensor_parallel))
    kinds = set()
    with local_engine(asking) as engine:
        apply = engine.scheduler.apply

        def checked(result: StepResult) -> list[RequestOutput]:
            counts, accepted = unpack_i32(result.counts).tolist(), unpack_i32(result.accepted).tolist()
            told = unpack_i32(result.min_entropies).tolist() or [-1] * len(counts)
            for entry, nats in enumerate(told):
                if counts[entry] and nats >= 0:
                    assert -nats / 1e3 == pytest.approx(result.logprobs[entry][0].top_logprobs[0], abs=2e-3)
                    kinds.add((accepted[entry] >= 0, -1 in told))
            return apply(result)

        engine.scheduler.apply = checked  # type: ignore[method-assign]
        favourites = itertools.cycle(range(len(engine.scheduler._shapes)))
        sampling = [replace(each, logprobs=1, max_tokens=20) for each in MIX]
        waiting = [Request(f"r{i}", prompt, sampling[i % len(MIX)]) for i, prompt in enumerate(pair.prompts[:9])]
        for step in itertools.count():
            if step % 7 == 0 and waiting:
                engine.scheduler.submit(waiting.pop())
            if step % 2 == 0:
                engine.scheduler.use_costs(cheap(engine.scheduler._shapes, next(favourites)))
            engine.step()
            if not waiting and engine.scheduler.num_running == 0:
                break
    assert kinds == {(True, False), (True, True), (False, False), (False, True)}
