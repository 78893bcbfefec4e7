"""A GPU filled to the limit: nothing that a request may ask for runs out of memory."""

import dataclasses
import gc
import random

import pytest
import torch

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import GraphCapture, SchedulerConfig
from aerie.workers.runner.build import build_rank
from aerie.workers.runner.graphs.warm_up import largest_steps, run
from aerie.workers.sampling import MAX_LOGPROBS
from aerie.workers.scheduling.plan import SamplingParams
from tests.support.embedded import CHAIN, TREE, embedded_spec

pytestmark = pytest.mark.gpu

FREE_GB = 4.0  # of the GPU; the rest is taken by a tensor, as another process would


@pytest.fixture
def hog() -> torch.Tensor:
    gc.collect()
    torch.cuda.empty_cache()  # what an earlier test left would be this process's beyond FREE_GB
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(max(0, free - int(FREE_GB * 1e9)), dtype=torch.uint8, device="cuda")


def _spec(speculative: SpeculativeConfig | None, cache: CacheConfig, num_slots: int) -> EngineSpec:
    spec = embedded_spec(speculative, debug=False)
    worker = dataclasses.replace(
        spec.worker,
        model=dataclasses.replace(spec.worker.model, device="cuda", dtype="bfloat16"),
        cache=cache,
        scheduler=SchedulerConfig(max_running=num_slots, max_step_tokens=4096, max_waiting=10_000),
        graph_capture=GraphCapture(limit_s=5, limit_gb=0.5),
    )
    return dataclasses.replace(spec, worker=worker)


@pytest.mark.parametrize("speculative", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_no_step_runs_out_of_memory_at_the_limit(hog: torch.Tensor, speculative: SpeculativeConfig | None) -> None:
    """All slots and all pages in use, the largest steps between them. num_ooms counts failures that torch's allocator
    mended by giving back what it kept, too: there are none."""
    spec = _spec(speculative, CacheConfig(), num_slots=256)
    torch.cuda.reset_peak_memory_stats()
    built = build_rank(spec.worker, plan_engine(spec), 0, "")
    assert built.layout.memory is not None
    assert built.layout.memory.left > 0.05 * FREE_GB * 1e9 and built.layout.memory.kv > 0.2 * FREE_GB * 1e9
    for _ in range(3):
        for _, plan in largest_steps(built.layout):
            run(built.worker, plan)
    assert torch.cuda.memory_stats()["num_ooms"] == 0
    del built
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 2000) for _ in range(rng.randrange(1000, 2000))] for _ in range(600)]
    sampling = SamplingParams(40, 1.0, top_p=0.9, frequency_penalty=0.2, logprobs=MAX_LOGPROBS, seed=1)
    with local_engine(spec) as engine:
        engine.generate(prompts, sampling, concurrency=600)
        assert engine.scheduler.allocator.num_held == 0
    assert torch.cuda.memory_stats()["num_ooms"] == 0
    assert hog.numel() > 0


@pytest.mark.parametrize("cache", [CacheConfig(memory_gb=FREE_GB), CacheConfig(num_pages=10**7)], ids=["GB", "pages"])
def test_what_does_not_fit_is_refused_at_start(hog: torch.Tensor, cache: CacheConfig) -> None:
    spec = _spec(CHAIN, cache, num_slots=16)
    with pytest.raises(ValueError, match=r"^cache\.(memory_gb|num_pages)=.* fit into cache.memory_share=0.9"):
        build_rank(spec.worker, plan_engine(spec), 0, "")
    assert hog.numel() > 0


def test_too_many_slots_are_refused_at_start(hog: torch.Tensor) -> None:
    spec = _spec(CHAIN, CacheConfig(), num_slots=400_000)
    with pytest.raises(
        ValueError, match="not enough GPU memory for the tables of 400000 requests .*: lower scheduler.max_run"
    ):
        build_rank(spec.worker, plan_engine(spec), 0, "")
    assert hog.numel() > 0
