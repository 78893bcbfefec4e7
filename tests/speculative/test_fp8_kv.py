"""KV in FP8: every pass reads what the cache stores, so that tokens depend neither on speculation nor on chunks, pages,
the prefix cache and preemption. In float32, where passes of other widths round almost no number to another of eight
bits; the runs are deterministic, so a test fails always or never on a machine."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine, plan_engine
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from tests.speculative.conftest import Pair
from tests.speculative.test_decoding import accepted_share, run
from tests.support.slow import slow
from tests.support.tiny_models import VOCAB, make_eagle, make_target

CACHE = CacheConfig(page_size=4, num_pages=400, dtype="fp8_e4m3")


def make_pair(folder: Path, architecture: str) -> Pair:
    """A target whose head is right about half the time."""
    target = make_target(folder / "target", calm=0.003, architecture=architecture)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 60, (8,), generator=generator).tolist()
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    prompts += [prompts[0] + prompts[1], prompts[0] + prompts[2]]  # which resume at cached pages
    eagle = make_eagle(folder / "eagle", target, copying=True)
    return Pair(target, eagle, eagle, prompts)


FAMILIES = ["Llama", "DeepseekV3", "Qwen3_5"]
SETTINGS: list[tuple[str, int, dict[str, object]]] = [
    ("chain", 7, {"page_size": 64, "num_pages": 40}),
    ("tree", 512, {"draft_dtype": "fp8_e4m3"}),
    ("none", 3, {"page_size": 1, "num_pages": 1600}),
    ("none", 512, {"prefix_cache": False}),
    ("tree", 32, {}),
]
QUICK = {("Llama", 0), ("DeepseekV3", 1)}  # K and V, and latent rows


@pytest.fixture(scope="module", params=FAMILIES)
def fp8_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), request.param)


@pytest.fixture(scope="module")
def plain(fp8_pair: Pair) -> list[list[int]]:
    return [r.output for r in run(fp8_pair, None, cache=CACHE)]


@pytest.mark.parametrize(
    "fp8_pair,shape,chunk,changes",
    [
        pytest.param(family, *setting, marks=() if (family, i) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for i, setting in enumerate(SETTINGS)
    ],
    indirect=["fp8_pair"],
)
def test_tokens_are_those_of_plain_decoding(
    fp8_pair: Pair, plain: list[list[int]], shape: str, chunk: int, changes: dict[str, object]
) -> None:
    speculative = {"none": None, "chain": fp8_pair.chain(), "tree": fp8_pair.tree()}[shape]
    cache = replace(CACHE, **changes)  # type: ignore[arg-type]
    requests = run(fp8_pair, speculative, cache=cache, scheduler=SchedulerConfig(5, chunk))
    assert [r.output for r in requests] == plain
    if speculative is not None:
        assert accepted_share(requests) > 0.3


@pytest.mark.parametrize("fp8_pair", ["Llama", *slow("DeepseekV3", "Qwen3_5")], indirect=True)
def test_preempted_requests_lose_nothing(fp8_pair: Pair, plain: list[list[int]]) -> None:
    requests = run(fp8_pair, fp8_pair.chain(), cache=replace(CACHE, num_pages=36))
    assert sum(r.num_preemptions for r in requests) > 0
    assert [r.output for r in requests] == plain


@pytest.mark.slow  # a second size of the tensor parallelism
def test_two_ranks_give_the_same_tokens(deep_pair: Pair) -> None:
    expected = [r.output for r in run(deep_pair, None, cache=CACHE)]
    assert [r.output for r in run(deep_pair, deep_pair.tree(), cache=CACHE, tensor_parallel=2)] == expected
    assert expected != [r.output for r in run(deep_pair, None)]  # eight bits are fewer


def test_half_the_bytes_are_nearly_twice_the_pages(pair: Pair) -> None:
    """The draft's pages and the tables keep 16 bits."""

    def pages(dtype: str) -> int:
        cache = CacheConfig(memory_gb=0.005, dtype=dtype)
        model = ModelSource(path=str(pair.target), device="cpu", dtype="bfloat16")
        spec = EngineSpec(WorkerConfig(model, cache, SchedulerConfig(max_running=2)), pair.chain())
        return plan_engine(spec).layout.num_pages

    assert pages("fp8_e4m3") > 1.6 * pages("model")  # of 8 + 1 layers; 1.8 and more from 32 layers on


def test_without_scales_a_start_says_that_they_are_1(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), local_engine(pair.spec(cache=CACHE)):
        pass
    assert "has no k_scale and v_scale of 4 layers: they get 1" in caplog.text
