"""Requests of every kind on an engine whose rounds were recorded, on a CPU, at start or between their steps: they get
the answers of an engine without recordings, and steps themselves record nothing."""

from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import GraphCapture
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.runner.batch import StepBatch, StepTensors
from aerie.workers.runner.decoding import FillMasks
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.graphs.graph_keys import bucket_sizes
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.commands.command import Command, CommandAnswer
from aerie.workers.scheduling.commands.command_queue import IDLE_S
from aerie.workers.scheduling.plan import SamplingParams, StepPlan
from aerie.workers.scheduling.request import Request
from tests.speculative.conftest import EOS, Pair
from tests.support.kernels.eager_graphs import LazyRecorder

GREEDY = SamplingParams(14, 0.0, stop_token_ids=(EOS,))
RANDOM = replace(GREEDY, temperature=1.0, seed=3)
TOKENS = (8, 24)  # of steps of up to 32 prompt tokens, so that some have graphs and some have none
SIZES = bucket_sizes(6)
LIMITS = {"all": GraphCapture(limit_s=1e9), "rarer kinds eager": GraphCapture()}
QUICK = {("chain", "rarer kinds eager")}  # all, while shapes change: `tests.speculative.test_adaptive`
MIX = (
    GREEDY,
    RANDOM,
    replace(RANDOM, top_k=5, top_p=0.8),
    replace(RANDOM, min_p=0.05, logprobs=3),
    replace(GREEDY, frequency_penalty=0.4, presence_penalty=0.3, min_tokens=4),
    replace(RANDOM, repetition_penalty=1.3, logit_bias={7: 4.0}, top_p=0.9, logprobs=0),
)


def with_recordings(
    engine: LocalEngine, limits: GraphCapture, sizes: Sequence[int] = SIZES
) -> tuple[LazyRecorder, GraphedDecoding]:
    """sizes: batch buckets."""
    worker, recorder = engine.executor, LazyRecorder()
    assert isinstance(worker, Worker)
    has_states = worker._strategy._target.states is not None  # type: ignore[attr-defined]
    graphs = GraphedDecoding(worker._strategy, worker._slots, sizes, 256, recorder, TOKENS, has_states=has_states)
    with torch.inference_mode():
        graphs.capture(limits, SOLO)
    worker._strategy = graphs
    return recorder, graphs


def answers(engine: LocalEngine, prompts: list[list[int]]) -> list[list[int]]:
    """Each kind by itself, then all together."""
    together = [Request(f"all-{i}", prompt, MIX[i % len(MIX)]) for i, prompt in enumerate(prompts)]
    alone = [Request(f"{k}", prompts[k], sampling) for k, sampling in enumerate(MIX)]
    for request in alone:
        engine.run([request], 1)
    engine.run(together, 6)
    return [request.output for request in alone + together]


@pytest.mark.parametrize(
    ("shape", "limits"),
    [
        pytest.param(shape, limits, id=f"{shape}-{name}", marks=() if (shape, name) in QUICK else pytest.mark.slow)
        for shape in ("plain", "chain", "tree")
        for name, limits in LIMITS.items()
    ],
)
def test_nothing_is_recorded_while_requests_run(pair: Pair, shape: str, limits: GraphCapture) -> None:
    speculative: SpeculativeConfig | None = {"plain": None, "chain": pair.chain(), "tree": pair.tree()}[shape]
    spec: EngineSpec = pair.spec(speculative)
    with local_engine(spec) as engine:
        expected = answers(engine, pair.prompts)
    with local_engine(spec) as engine:
        recorder, graphs = with_recordings(engine, limits)
        num_recorded, captured = recorder.num_recorded, graphs.captured
        with_chunks: list[bool] = []
        step = graphs.step

        def noted(batch: StepBatch, fill_masks: FillMasks | None = None) -> StepTensors:
            before = recorder.num_replays
            out = step(batch, fill_masks)
            if batch.chunks is not None:
                with_chunks.append(recorder.num_replays > before)
            return out

        graphs.step = noted  # type: ignore[method-assign]
        assert answers(engine, pair.prompts) == expected
        assert any(with_chunks) == (limits.limit_s > 0) and not all(with_chunks)
        assert recorder.num_recorded == num_recorded and graphs.captured == captured
        assert recorder.num_replays > 0


def test_what_is_recorded_between_steps_changes_no_answer(pair: Pair) -> None:
    """A few recordings at start; then those that requests miss, one in an interval, and all while nobody is there."""
    spec: EngineSpec = pair.spec(pair.chain())
    with local_engine(spec) as engine:
        expected = answers(engine, pair.prompts)
    with local_engine(spec) as engine:
        recorder, worker = LazyRecorder(), engine.executor
        assert isinstance(worker, Worker)
        graphs = GraphedDecoding(worker._strategy, worker._slots, bucket_sizes(6), 256, recorder, TOKENS)
        with torch.inference_mode():
            graphs.capture(GraphCapture(), SOLO, graphs.first_graphs([(0, 1, 0, 0), (0, 0, TOKENS[0], 0)]))
        worker._strategy = worker._captures = graphs
        pacing, now = engine.scheduler.captures, [0.0]
        pacing._clock, pacing._interval_s = lambda: now[0], 5.0
        pacing.reset()
        pacing.graphs = worker.graphs
        at_start, submit, carry_out, num_busy = worker.graphs, worker.submit, worker.carry_out, 0

        def noted(plan: StepPlan) -> None:
            now[0] += 0.5
            before = worker.graphs.num_captured
            submit(plan)
            assert worker.graphs.num_captured == before

        def counted(command: Command) -> tuple[CommandAnswer, ...]:
            nonlocal num_busy
            now[0] += 0.5
            before = worker.graphs.num_captured
            num_busy += 1
            answers = carry_out(command)
            assert worker.graphs.num_captured == before + 1
            return answers

        worker.submit, worker.carry_out = noted, counted  # type: ignore[method-assign]
        assert answers(engine, pair.prompts) == expected
        assert 2 < num_busy <= now[0] / 5.0 and engine.scheduler.stats.num_steps > 8 * num_busy
        assert worker.graphs.num_waiting == at_start.num_waiting - num_busy > 0
        engine.step()
        assert worker.graphs.num_waiting == at_start.num_waiting - num_busy, "somebody was there just now"
        now[0] += IDLE_S
        while worker.graphs.num_waiting:
            engine.step()
        assert len(graphs.captured) == at_start.num_captured + at_start.num_waiting
