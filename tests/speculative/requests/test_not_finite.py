"""A request whose logits are NaN or infinite ends with an error; what runs beside it and after it, on the same pages
and the same slots, does not change."""

import collections
import copy
import itertools

import pytest
from torch import Tensor

from aerie.attention.config import CacheConfig
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import SchedulerConfig
from aerie.workers.layers.linear_method import DenseLinearMethod, LinearMethod
from aerie.workers.models.decoder import Decoder
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import FinishReason, Request, RequestOutput
from tests.speculative.conftest import EOS, Pair
from tests.support.simulation.integrity import check_queues
from tests.support.slow import slow
from tests.support.tiny_models import VOCAB

SHAPED = "filtered, scored, shaped"
SAMPLINGS = {
    "greedy": SamplingParams(16, 0.0, stop_token_ids=(EOS,)),
    "random": SamplingParams(16, 0.5, seed=5),
    SHAPED: SamplingParams(16, 1.0, top_p=0.9, seed=6, logprobs=3, frequency_penalty=0.5),
}
POISON = VOCAB - 1  # whatever attends to it is NaN
CACHE = CacheConfig(page_size=4, num_pages=90)  # so few that pages change owners all the time


def target_of(engine: LocalEngine) -> Decoder:
    worker = engine.executor
    assert isinstance(worker, Worker)
    model: Decoder = worker._strategy._target.model  # type: ignore[attr-defined]
    return model


def set_row(head: LinearMethod, token: int, row: Tensor | float) -> None:
    """Set a token's row of a vocabulary head."""
    assert isinstance(head, DenseLinearMethod)
    head.dense_weight().data[token] = row
    head.finish(GEMMOptions())


def run(engine: LocalEngine, prompts: list[list[int]], sampling: SamplingParams, name: str) -> dict[str, RequestOutput]:
    """The last output of each request, by its id."""
    requests = [Request(f"{name}-{i}", list(prompt), sampling) for i, prompt in enumerate(prompts)]
    last: dict[str, RequestOutput] = {}
    engine.run(requests, 6, lambda output: last.__setitem__(output.request.request_id, output))
    return last


def outputs(last: dict[str, RequestOutput]) -> list[list[int]]:
    return [each.request.output for _, each in sorted(last.items())]


@pytest.mark.parametrize(
    "shape,kind", [("tree", SHAPED), *slow(("plain", SHAPED), ("tree", "greedy"), ("chain", "random"))]
)
def test_a_request_whose_logits_are_nan_ends_alone(pair: Pair, shape: str, kind: str) -> None:
    speculative = {"plain": None, "chain": pair.chain(), "tree": pair.tree()}[shape]
    sampling = SAMPLINGS[kind]
    prompts = [[token % POISON for token in prompt] for prompt in pair.prompts]
    hurt = [[*prompt[:-1], POISON, *prompts[-1]] for prompt in prompts[:5]]
    spec = pair.spec(speculative, CACHE, SchedulerConfig(6, 32))
    with local_engine(spec) as engine:
        model = target_of(engine)
        set_row(model.lm_head.method, POISON, 0.0)  # the target never chooses it
        undisturbed = outputs(run(engine, prompts, sampling, "before"))
        assert all(POISON not in output for output in undisturbed)
        model.embed_tokens.weight.data[POISON] = float("nan")
        together = [
            prompt
            for both in zip(prompts, [*hurt, *[None] * (len(prompts) - 5)], strict=True)
            for prompt in both
            if prompt
        ]
        last = run(engine, together, sampling, "beside")
        for output in last.values():
            if POISON in output.request.prompt:
                assert output.finish_reason is FinishReason.ERROR and output.request.output == []
                assert output.error == "the model's logits for its next token are NaN or infinite"
        healthy = {name: output for name, output in last.items() if POISON not in output.request.prompt}
        assert sorted(outputs(healthy)) == sorted(undisturbed)
        assert outputs(run(engine, prompts, sampling, "after")) == undisturbed
        assert engine.scheduler.kv_usage == 0
        check_queues(engine.scheduler.queues)
        pools = engine.executor._batches._pools  # type: ignore[attr-defined]
        spoilt = engine.scheduler.slot_pages.nan_pages.pages
        for pool in pools:
            for tensor in (tensor for tensors in pool.tensors for tensor in tensors):
                nan = set(tensor.isnan().flatten(2).any(2).any(0).nonzero().flatten().tolist())
                assert nan <= spoilt, "NaN where the next owner would meet it"


def test_weights_that_are_nan_end_all_requests_and_mended_ones_serve_again(pair: Pair) -> None:
    """Nothing of the prefix cache is left of what was computed meanwhile."""
    sampling = SAMPLINGS["greedy"]
    with local_engine(pair.spec(pair.chain(), CACHE)) as engine:
        undisturbed = outputs(run(engine, pair.prompts, sampling, "before"))
        norm = target_of(engine).norm.weight
        kept = norm.data.clone()
        norm.data.fill_(float("nan"))
        last = run(engine, pair.prompts, sampling, "broken")
        assert {output.finish_reason for output in last.values()} == {FinishReason.ERROR}
        norm.data.copy_(kept)
        assert outputs(run(engine, pair.prompts, sampling, "after")) == undisturbed


@pytest.mark.parametrize("shape", ["chain", *slow("tree")])
@pytest.mark.parametrize("num_pages", [90, *slow(400)])
def test_a_draft_that_is_nan_for_one_token_costs_acceptance_where_it_stands(
    pair: Pair, shape: str, num_pages: int
) -> None:
    """With few pages, healthy requests get pages in which a draft's KV is NaN."""
    speculative = pair.chain(adaptive=False) if shape == "chain" else pair.tree()
    prompts = [[token % POISON for token in prompt] for prompt in pair.prompts]
    hurt = [[*prompt[:3], POISON, *prompts[-1]] for prompt in prompts[:5]]
    spec = pair.spec(speculative, CacheConfig(page_size=4, num_pages=num_pages))
    ends = []
    for is_broken in (False, True):
        with local_engine(spec) as engine:
            worker = engine.executor
            assert isinstance(worker, Worker)
            draft = worker._strategy._draft.model  # type: ignore[attr-defined]
            draft.embed_tokens = copy.deepcopy(draft.embed_tokens)  # it was the target's
            if is_broken:
                draft.embed_tokens.weight.data[POISON] = float("nan")
            ends.append(run(engine, [*hurt, *prompts], SAMPLINGS["greedy"], "r"))
            check_queues(engine.scheduler.queues)
    before, after = ends
    assert {end.error for end in after.values()} == {None} and outputs(after) == outputs(before)
    accepted = [
        [sum(k * n for k, n in enumerate(end[f"r-{i}"].request.acceptance_histogram)) for i in range(len(end))]
        for end in ends
    ]
    assert sum(accepted[1][: len(hurt)]) < 0.5 * sum(accepted[0][: len(hurt)])
    assert accepted[1][len(hurt) :] == accepted[0][len(hurt) :]


@pytest.mark.parametrize("shape", ["tree", *slow("chain")])
def test_a_drafted_token_whose_embedding_is_nan_costs_its_acceptance_alone(pair: Pair, shape: str) -> None:
    """The target computes NaN for it beside the nodes before it, which must not become NaN."""
    prompts = [[token % POISON for token in prompt] for prompt in pair.prompts]
    speculative = pair.chain(adaptive=False) if shape == "chain" else pair.tree()
    with local_engine(pair.spec(speculative, CACHE)) as engine:
        worker = engine.executor
        assert isinstance(worker, Worker)
        target, draft = target_of(engine), worker._strategy._draft.model  # type: ignore[attr-defined]
        draft.lm_head = copy.deepcopy(draft.lm_head)  # it was the target's
        set_row(target.lm_head.method, POISON, 0.0)  # the target never chooses it
        undisturbed = outputs(run(engine, prompts, SAMPLINGS["greedy"], "before"))
        [(often, _)] = collections.Counter(itertools.chain(*undisturbed)).most_common(1)
        head = draft.lm_head.method
        set_row(head, POISON, 2.0 * head.dense_weight().data[often])
        target.embed_tokens.weight.data[POISON] = float("nan")
        last = run(engine, prompts, SAMPLINGS["greedy"], "after")
        assert {end.error for end in last.values()} == {None} and outputs(last) == undisturbed


@pytest.mark.slow  # a draft that is NaN for one token is, too
@pytest.mark.parametrize("shape", ["tree", "chain", "eagle3"])
def test_a_draft_that_is_nan_changes_no_token(pair: Pair, shape: str) -> None:
    sampling, prompts = SAMPLINGS["greedy"], pair.prompts[:8]
    eagle3 = SpeculativeConfig(str(pair.eagle3), "eagle3", 3, 4, 12)
    for speculative in ({"chain": pair.chain(), "tree": pair.tree(), "eagle3": eagle3}[shape],):
        with local_engine(pair.spec(speculative, CACHE)) as engine:
            undisturbed = outputs(run(engine, prompts, sampling, "before"))
            worker = engine.executor
            assert isinstance(worker, Worker)
            draft = worker._strategy._draft.model  # type: ignore[attr-defined]
            shared = {weight.data_ptr() for weight in target_of(engine).parameters()}
            for weight in draft.parameters():
                if weight.data_ptr() not in shared:
                    weight.data.fill_(float("nan"))
            assert outputs(run(engine, prompts, sampling, "after")) == undisturbed
