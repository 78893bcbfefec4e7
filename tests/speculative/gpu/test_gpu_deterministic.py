"""`deterministic: true` on a GPU: answers in bfloat16 that depend on nothing but their request, to the token."""

import dataclasses
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import LoraConfig, SchedulerConfig
from aerie.workers.scheduling.plan import SamplingParams
from tests.speculative.conftest import Pair
from tests.support import MODELS
from tests.support.embedded import CHAIN, TREE, embedded_spec
from tests.support.prompts import held_out_prompts, tokenized
from tests.support.targets.adapters import make_adapter
from tests.support.tiny_models import VOCAB, add_mtp, make_eagle, make_target
from tests.workers.layers.test_block_fp8 import quantised

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


def test_neither_do_adapters_of_other_requests(prompts: list[list[int]], tmp_path: Path) -> None:
    """Two adapters and none: alone, and beside each other with and without drafts."""
    folders = {name: str(make_adapter(tmp_path / name, MODELS / "target", seed, 0.2)) for seed, name in enumerate("ab")}
    names = [("", "a", "b")[i % 3] for i in range(len(prompts))]

    def adapted(speculative: SpeculativeConfig | None, at_once: int) -> list[list[int]]:
        spec = deterministic(speculative)
        worker = dataclasses.replace(spec.worker, lora=LoraConfig(folders, max_loras=2, max_lora_rank=16))
        sampling = [replace(GREEDY, adapter=name) for name in names]
        with local_engine(dataclasses.replace(spec, worker=worker)) as engine:
            return [list(request.output) for request in engine.generate(prompts, sampling, at_once)]

    expected = adapted(None, 1)
    assert adapted(None, 13) == expected
    assert adapted(TREE, 13) == expected


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
    monkeypatch.setattr("aerie.attention.backends.triton_backend.FIXED_SPAN", 64)
    expected = answers(deterministic(None), prompts, GREEDY, 1)
    for speculative in (None, CHAIN, TREE):
        assert answers(deterministic(speculative), prompts, GREEDY, 13) == expected


EXPERTS = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts_per_tok": 4}
QWEN3 = EXPERTS | {"architecture": "Qwen3Moe", "head_dim": 64, "num_experts": 16}
GPT_OSS = EXPERTS | {"architecture": "GptOss", "head_dim": 64, "intermediate_size": 200, "num_local_experts": 16}
GPT_OSS |= {"attention_bias": False}  # as the draft, but experts have biases
V3 = EXPERTS | {
    "architecture": "DeepseekV3",
    "n_routed_experts": 16,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 64,
}


HYBRID = {"architecture": "Qwen3_5", "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
HYBRID |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}


@pytest.fixture(scope="module", params=["Qwen3", "gpt-oss", "Qwen3.5", "V3", "V3 in FP8"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, SpeculativeConfig]:
    """A target with experts or recurrent layers, with nearly even logits, so that last bits matter, and its chain."""
    folder: Path = tmp_path_factory.mktemp("mixture")
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (3, 200, 61, 40, 17, 130, 64, 1, 99)
    ]
    sizes = {"Qwen3": QWEN3, "gpt-oss": GPT_OSS, "Qwen3.5": HYBRID}.get(request.param, V3)
    target = make_target(folder / "t", calm=0.005 if sizes is HYBRID else 0.1, **sizes)
    eagle = make_eagle(folder / "eagle", target, copying=True)
    if sizes is not V3:
        pair = Pair(target, eagle, eagle, prompts)
        return pair, pair.chain()
    add_mtp(target, copying=True)
    if request.param == "V3 in FP8":
        target = quantised(target, folder / "q", block=(128, 128))
    return Pair(target, eagle, eagle, prompts), SpeculativeConfig("", "mtp", 3, 1, 4)


def exact_spec(pair: Pair, speculative: SpeculativeConfig | None, max_step_tokens: int, pages: int = 400) -> EngineSpec:
    spec: EngineSpec = pair.spec(speculative, CacheConfig(16, pages), SchedulerConfig(16, max_step_tokens))
    model = dataclasses.replace(spec.worker.model, device="cuda", dtype="bfloat16")
    worker = dataclasses.replace(spec.worker, model=model, deterministic=True, debug=False)
    return dataclasses.replace(spec, worker=worker)


def test_with_experts_and_recurrent_layers_neither(mixture: tuple[Pair, SpeculativeConfig]) -> None:
    """Company, speculation, cuts of prompts."""
    pair, chain = mixture

    def outputs(speculative: SpeculativeConfig | None, at_once: int, max_step_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(48, 1.0, seed=7)
        return answers(exact_spec(pair, speculative, max_step_tokens), pair.prompts, sampling, at_once)

    expected = outputs(None, 1, 512)
    assert outputs(None, 9, 48) == expected
    assert outputs(chain, 1, 512) == outputs(chain, 9, 96) == expected
    assert outputs(dataclasses.replace(chain, num_steps=4, top_k=3, num_draft_tokens=10), 9, 128) == expected


def test_with_experts_and_recurrent_layers_neither_does_the_prefix_cache(
    mixture: tuple[Pair, SpeculativeConfig],
) -> None:
    """The same requests once more in an engine, from cached pages and states, beside rounds of others; with few pages,
    after preemptions."""
    pair, chain = mixture
    sampling = SamplingParams(48, 1.0, seed=7, logprobs=0)
    expected = answers(exact_spec(pair, None, 512), pair.prompts, sampling, 1)
    for speculative, pages in ((None, 400), (None, 40), (chain, 400)):
        with local_engine(exact_spec(pair, speculative, 96, pages)) as engine:
            for _ in range(3):
                requests = engine.generate(pair.prompts, sampling, 9)
                assert [list(request.output) for request in requests] == expected
            if pages == 400:
                assert any(request.cached_tokens for request in requests)
            else:
                assert engine.scheduler.stats.num_preemptions > 0
