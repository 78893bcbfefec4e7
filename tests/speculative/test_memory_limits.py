"""An engine that finds out by itself how much memory it may take, and runs at the limit of it."""

import dataclasses
import random

import pytest
import torch

from aerie.attention.config import CacheConfig
from aerie.speculative.build import local_engine, plan_engine
from aerie.workers.config import SchedulerConfig
from aerie.workers.runner.build import build_rank
from aerie.workers.runner.memory import HostMemory, RankMemory
from aerie.workers.scheduling.plan import SamplingParams
from tests.speculative.conftest import Pair
from tests.support.tiny_models import VOCAB


def test_a_rank_is_built_to_what_there_is_and_its_replacement_to_the_same(pair: Pair) -> None:
    spec = pair.spec(pair.tree(), CacheConfig(page_size=4), SchedulerConfig(max_step_tokens=61))
    built = build_rank(spec.worker, plan_engine(spec), 0, "")
    assert built.layout.scheduler.num_slots == 32  # of the tiny pair's requests there is room for thousands
    memory = built.layout.memory
    assert memory is not None
    assert 0 < (built.layout.num_pages + 1) * built.layout.bytes_per_page == memory.kv <= 10**9
    former = built.layout.with_slots(9).with_pages(50)
    again = build_rank(spec.worker, dataclasses.replace(plan_engine(spec), layout=former), 0, "")
    assert (again.layout.num_pages, again.layout.scheduler.num_slots) == (50, 9)


def test_the_largest_steps_run_and_their_peak_is_seen(pair: Pair) -> None:
    """What a GPU's start does to measure; a CPU's start does not."""
    spec = pair.spec(pair.tree(), CacheConfig(4, num_pages=2), SchedulerConfig(max_running=5, max_step_tokens=61))
    built = build_rank(spec.worker, plan_engine(spec), 0, "")
    memory = RankMemory(HostMemory(), spec.worker, built.layout, torch.device("cpu"))
    peaks = memory.step_peaks(built.worker, built.layout)
    assert 0 <= peaks.rounds <= peaks.all_steps < 10**9


def test_a_start_that_measures_goes_on_to_serve(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of things on a GPU, on a CPU: the largest steps on a pool of one page and again on all of it."""
    monkeypatch.setattr(RankMemory, "runs_steps", True)
    cache = CacheConfig(page_size=4, num_pages=300)
    spec = pair.spec(pair.chain(), cache, SchedulerConfig(max_running=4, max_step_tokens=33))
    with local_engine(spec) as engine:
        measured = engine.generate(pair.prompts[:5], SamplingParams(20, 0.0))
    monkeypatch.undo()
    with local_engine(spec) as engine:
        expected = engine.generate(pair.prompts[:5], SamplingParams(20, 0.0))
    assert [request.output for request in measured] == [request.output for request in expected]


def test_all_slots_and_all_pages_in_use(pair: Pair) -> None:
    """Slots by themselves, and a pool in which their requests do not all fit: every one of them ends."""
    rng = random.Random(1)
    cache, scheduler = CacheConfig(page_size=4, num_pages=60, prefix_cache=False), SchedulerConfig(max_step_tokens=40)
    prompts = [[rng.randrange(2, VOCAB) for _ in range(rng.randrange(3, 90))] for _ in range(20)]
    with local_engine(pair.spec(pair.chain(), cache, scheduler)) as engine:
        assert engine.scheduler.num_slots == 8
        requests = engine.generate(prompts, SamplingParams(30, 1.0, seed=4, logprobs=20, top_p=0.9), concurrency=20)
        assert engine.scheduler.allocator.num_free == 60
    assert all(len(request.output) == 30 for request in requests)
