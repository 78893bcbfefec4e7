"""Sampling in captured rounds on a GPU: what eager rounds emit, whatever else is in the batch and came before."""

import dataclasses
from collections import defaultdict

import pytest
from msgspec.structs import replace

from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import GraphCapture
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.graphs.graph_keys import is_always_captured
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.runner.worker import Worker
from aerie.workers.sampling import CAPTURED_NEEDS
from aerie.workers.scheduling.plan import SamplingParams, StepPlan, TokenLogprobs
from aerie.workers.scheduling.request import Request, RequestOutput
from tests.speculative.gpu.test_gpu import on_gpu
from tests.support.embedded import CHAIN, TREE
from tests.support.kernels.gpu_waits import refuse_gpu_waits
from tests.support.prompts import held_out_prompts, tokenized

pytestmark = pytest.mark.gpu

TOKENS = 48
GREEDY = SamplingParams(TOKENS, 0.0, stop_token_ids=(2,))
NUCLEUS = SamplingParams(TOKENS, 1.0, top_p=0.9, seed=11, stop_token_ids=(2,))
SHAPED = SamplingParams(
    TOKENS,
    0.8,
    top_k=40,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    min_tokens=12,
    logit_bias={40: 1.5, 7: -3.0},
    seed=5,
    stop_token_ids=(2,),
)
TOLD = replace(GREEDY, logprobs=5)
MIXED = (
    GREEDY,
    NUCLEUS,
    SHAPED,
    TOLD,
    replace(NUCLEUS, top_p=1.0, min_p=0.1, logprobs=20),
    replace(SHAPED, temperature=0.0, logprobs=0),
    replace(GREEDY, speculative=False),
    replace(NUCLEUS, top_p=0.95, top_k=30),
    SamplingParams(TOKENS, 1.0, seed=2, stop_token_ids=(2,)),
)
STRATEGIES = pytest.mark.parametrize("speculative", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])

Answer = tuple[list[int], list[TokenLogprobs]]


def run(engine: LocalEngine, count: int, mix: tuple[SamplingParams, ...], concurrency: int = 13) -> list[Answer]:
    """Outputs and log-probabilities of `count` prompts, whose parameters take turns."""
    told: dict[str, list[TokenLogprobs]] = defaultdict(list)
    prompts = tokenized(held_out_prompts(count))
    requests = [Request(str(i), prompt, mix[i % len(mix)]) for i, prompt in enumerate(prompts)]

    def listen(output: RequestOutput) -> None:
        told[output.request.request_id].extend(output.logprobs or ())

    engine.run(requests, concurrency, listen)
    return [(request.output, told[request.request_id]) for request in requests]


def answers(spec: EngineSpec, count: int, mix: tuple[SamplingParams, ...]) -> list[Answer]:
    with local_engine(spec) as engine:
        return run(engine, count, mix)


def graphs(engine: LocalEngine) -> GraphedDecoding:
    assert isinstance(engine.executor, Worker) and isinstance(engine.executor._strategy, GraphedDecoding)
    return engine.executor._strategy


@STRATEGIES
def test_graphs_emit_what_eager_rounds_emit(speculative: SpeculativeConfig | None) -> None:
    """13 requests of nine kinds in a bucket of 16, and every bucket edge on the way down."""
    eager = answers(on_gpu(speculative, graphs=False, dtype="float32"), 54, MIXED)
    graphed = answers(on_gpu(speculative, dtype="float32"), 54, MIXED)
    different = 0
    for i, ((tokens, logprobs), (other, other_logprobs)) in enumerate(zip(eager, graphed, strict=True)):
        different += tokens != other
        if tokens == other:
            assert len(logprobs) == len(other_logprobs) == (len(tokens) if MIXED[i % len(MIXED)].logprobs >= 0 else 0)
            for ours, theirs in zip(logprobs, other_logprobs, strict=True):
                # float32 logits of magnitude 30, from products that are cut otherwise
                assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-4)
                assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=2e-4)
    # padded batches are cut and multiplied otherwise, so the last bits may differ: a tie in 10^4 tokens
    assert different <= 2


@STRATEGIES
def test_log_probabilities_are_of_the_emitted_tokens(speculative: SpeculativeConfig | None) -> None:
    """Read a step late, after the next replay wrote to the graph's outputs: a greedy token is still its row's best."""
    for tokens, logprobs in answers(on_gpu(speculative, dtype="float32"), 26, (TOLD,)):
        assert [entry.top_ids[0] for entry in logprobs] == tokens
        assert all(entry.logprob == entry.top_logprobs[0] and len(entry.top_ids) == 5 for entry in logprobs)
        assert all(list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True) for entry in logprobs)


@pytest.mark.parametrize("sampling", [NUCLEUS, SHAPED, replace(NUCLEUS, top_p=1.0, min_p=0.05)])
def test_speculation_changes_few_filtered_answers(sampling: SamplingParams) -> None:
    """Prints the share of equal answers; float32 products of another width differ in the last bits."""
    plain = answers(on_gpu(None, dtype="float32"), 60, (sampling,))
    for name, speculative in (("chain", CHAIN), ("tree", TREE)):
        found = answers(on_gpu(speculative, dtype="float32"), 60, (sampling,))
        equal = sum(a[0] == b[0] for a, b in zip(plain, found, strict=True)) / len(plain)
        print(f"{name}: {equal:.2f} of answers equal")
        assert equal >= 0.95


@STRATEGIES
def test_no_round_is_captured_while_requests_run(speculative: SpeculativeConfig | None) -> None:
    """Greedy, penalised, greedy, penalised: tokens as in engines of their own, and no graph but those of the start."""
    spec = on_gpu(speculative, dtype="float32")
    alone = [answers(spec, 13, (sampling,)) for sampling in (GREEDY, SHAPED)]
    with local_engine(spec) as engine:
        at_start = graphs(engine).captured
        assert {key.needs for key in at_start} == set(CAPTURED_NEEDS)
        first, second = run(engine, 13, (GREEDY,)), run(engine, 13, (SHAPED,))
        third, fourth = run(engine, 13, (GREEDY,)), run(engine, 13, (SHAPED,))
        run(engine, 13, MIXED)
        assert graphs(engine).captured == at_start
    for ours, expected in ((first, alone[0]), (third, alone[0]), (second, alone[1]), (fourth, alone[1])):
        assert sum(a[0] != b[0] for a, b in zip(ours, expected, strict=True)) <= 1


@STRATEGIES
def test_rounds_without_a_graph_emit_the_same(speculative: SpeculativeConfig | None) -> None:
    """An allowance of nothing leaves filters, penalties and log-probabilities to eager rounds."""
    spec = on_gpu(speculative, dtype="float32")
    worker = dataclasses.replace(spec.worker, graph_capture=GraphCapture(limit_gb=0.0))
    captured = answers(spec, 26, MIXED)
    with local_engine(dataclasses.replace(spec, worker=worker)) as engine:
        assert all(is_always_captured(key) for key in graphs(engine).captured)
        eager = run(engine, 26, MIXED)
    # padded batches are multiplied otherwise, so the last bits may differ
    assert sum(a[0] != b[0] for a, b in zip(captured, eager, strict=True)) <= 1


@STRATEGIES
def test_requests_of_every_kind_are_admitted_without_waiting(speculative: SpeculativeConfig | None) -> None:
    """torch raises where a step that is submitted would wait for the GPU; the second time, so that all is loaded."""
    with local_engine(on_gpu(speculative, dtype="float32")) as engine:
        run(engine, 26, MIXED)
        submit = engine.executor.submit

        def submit_without_waiting(plan: StepPlan) -> None:
            with refuse_gpu_waits():
                submit(plan)

        engine.executor.submit = submit_without_waiting  # type: ignore[method-assign]
        run(engine, 26, MIXED)


@pytest.mark.gpu(2)
@STRATEGIES
def test_two_gpus_emit_what_one_does(speculative: SpeculativeConfig | None) -> None:
    one = answers(on_gpu(speculative, dtype="float32"), 36, MIXED)
    two = answers(on_gpu(speculative, dtype="float32", tensor_parallel=2), 36, MIXED)
    assert sum(a[0] != b[0] for a, b in zip(one, two, strict=True)) <= 2
