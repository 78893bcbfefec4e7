"""`deterministic: true` on a GPU: answers in bfloat16 that depend on nothing but their request, to the token."""

import dataclasses

import pytest

from speculative.build import EngineSpec
from speculative.config import SpeculativeConfig
from speculative.local import local_engine
from tests.support.embedded import CHAIN, TREE, embedded_spec
from tests.support.prompts import held_out_prompts, tokenized
from workers.scheduling.plan import SamplingParams

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(64, 0.0, stop_token_ids=(2,))
RANDOM = SamplingParams(64, 1.0, top_p=0.9, seed=11, stop_token_ids=(2,))


def deterministic(speculative: SpeculativeConfig | None, max_step_tokens: int = 512) -> EngineSpec:
    spec = embedded_spec(speculative, debug=False)
    model = dataclasses.replace(spec.worker.model, device="cuda", dtype="bfloat16")
    scheduler = dataclasses.replace(spec.worker.scheduler, max_step_tokens=max_step_tokens)
    return dataclasses.replace(
        spec, worker=dataclasses.replace(spec.worker, model=model, scheduler=scheduler, deterministic=True)
    )


def answers(spec: EngineSpec, prompts: list[list[int]], sampling: SamplingParams, at_once: int) -> list[list[int]]:
    with local_engine(spec) as engine:
        return [list(request.output) for request in engine.generate(prompts, sampling, at_once)]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return tokenized(held_out_prompts(100))


@pytest.fixture(scope="module", params=[GREEDY, RANDOM], ids=["greedy", "random"])
def alone(request: pytest.FixtureRequest, prompts: list[list[int]]) -> tuple[SamplingParams, list[list[int]]]:
    """The answers one by one, without speculation."""
    return request.param, answers(deterministic(None), prompts, request.param, 1)


@pytest.mark.parametrize("speculative", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("at_once", [1, 13])
def test_neither_speculation_nor_company_changes_a_token(
    alone: tuple[SamplingParams, list[list[int]]],
    prompts: list[list[int]],
    speculative: SpeculativeConfig | None,
    at_once: int,
) -> None:
    sampling, expected = alone
    assert answers(deterministic(speculative), prompts, sampling, at_once) == expected


def test_neither_do_cuts_of_prompts_nor_the_prefix_cache(prompts: list[list[int]]) -> None:
    """Second questions whose beginning is a first question with its answer: from the cache, where it was decoded or
    verified, and as a prompt."""
    first = answers(deterministic(None), prompts, GREEDY, 13)
    second = [p + [t for t in a if t != 2] + p[1:] for p, a in zip(prompts, first, strict=True)]
    expected = answers(deterministic(None, max_step_tokens=48), second, GREEDY, 13)
    for speculative in (None, CHAIN, TREE):
        with local_engine(deterministic(speculative)) as engine:
            assert [list(r.output) for r in engine.generate(prompts, GREEDY, 13)] == first
            assert [list(r.output) for r in engine.generate(second, GREEDY, 13)] == expected


def test_contexts_of_several_spans(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """With spans of 64 tokens."""
    monkeypatch.setattr("attention.backends.triton_backend.fixed_span", lambda max_model_len: 64)
    expected = answers(deterministic(None), prompts, GREEDY, 1)
    for speculative in (None, CHAIN, TREE):
        assert answers(deterministic(speculative), prompts, GREEDY, 13) == expected
