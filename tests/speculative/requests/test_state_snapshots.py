"""The prefix cache of hybrid models: prompts that resume at saved states get the answers that they get without a cache,
and every saved state is what the recurrence makes of its tokens.

Everything is float32, where a state that was saved by another way (chunks, rounds, replays) differs by rounding alone.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.runner import local_engine as engines
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.support.clients.conversations import Conversations
from tests.support.drafts.oracle import capture
from tests.support.engine_plans import as_captured
from tests.support.simulation.integrity import check_queues
from tests.support.slow import slow
from tests.support.tiny_models import VOCAB, make_eagle, make_target

MAX_LEN, ANSWER = 150, 14


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("hybrid")
    # calm: its drafts are often right, and tokens that are nearly as likely are rare
    target = make_target(folder / "target", architecture="Qwen3_5", calm=0.3, linear_num_key_heads=2)
    return target, make_eagle(folder / "eagle", target, copying=True)


def spec_of(models: tuple[Path, Path], draft: str, cache: CacheConfig) -> EngineSpec:
    worker = WorkerConfig(
        ModelSource(path=str(models[0]), device="cpu"),
        cache,
        SchedulerConfig(max_running=6, max_step_tokens=40),
        measure_costs=False,
    )
    if not draft:
        return EngineSpec(worker, None)
    steps, top_k, tokens = {"chain": (3, 1, 4), "tree": (3, 2, 8)}[draft]
    return EngineSpec(worker, SpeculativeConfig(str(models[1]), "eagle", steps, top_k, tokens))


def turns(engine: LocalEngine, conversations: Conversations, count: int, seed: int) -> list[Request]:
    """The requests of `count` turns, several at once; some are aborted."""
    rng, requests, running = np.random.default_rng(seed), list[Request](), 0
    while len(requests) < count or running:
        while len(requests) < count and running < 8:
            sampling = SamplingParams(int(rng.integers(1, ANSWER)), 0.0)
            requests.append(Request(f"turn-{len(requests)}", conversations.turn(), sampling))
            engine.scheduler.submit(requests[-1])
            running += 1
        if rng.random() < 0.002 and engine.scheduler.abort(requests[-1].request_id) is not None:
            requests.pop()
            running -= 1
        for output in engine.step():
            if output.finish_reason is not None:
                conversations.ended(output.request)
                running -= 1
        check_queues(engine.scheduler.queues)
    return requests


def differences(
    models: tuple[Path, Path], draft: str, cache: CacheConfig, count: int, seed: int, captured: bool = False
) -> tuple[int, float]:
    """Turns whose answers differ from those without a cache, and the share of prompt tokens that was saved."""
    torch.set_num_threads(1)
    spec = spec_of(models, draft, cache)
    plan = as_captured(plan_engine(spec)) if captured else plan_engine(spec)
    with engines.local_engine(spec.worker, plan) as engine:
        if captured:  # steps run from the inputs of graphs, which are filled before each
            assert isinstance(engine.executor, Worker)
            capture(engine.executor, plan.layout)
        requests = turns(engine, Conversations(seed, VOCAB, MAX_LEN), count, seed)
        check_states(engine, models, cache)
    each = [SamplingParams(len(request.output), 0.0) for request in requests]
    with local_engine(spec_of(models, draft, dataclasses.replace(cache, prefix_cache=False))) as engine:
        expected = engine.generate([request.prompt for request in requests], each, 8)
    saved = sum(request.cached_tokens for request in requests) / sum(len(request.prompt) for request in requests)
    return sum(a.output != b.output for a, b in zip(requests, expected, strict=True)), saved


def saved_states(engine: LocalEngine) -> Iterator[tuple[list[int], int]]:
    """The tokens and the row of every snapshot in the tree."""
    cache = engine.scheduler.prefix_cache
    assert cache is not None
    for node in cache._nodes():
        path, before = [], node
        while before is not None:
            path.append(before.tokens[: len(before.pages) * cache.page_size].tolist())
            before = before.parent
        tokens = [token for part in reversed(path) for token in part]
        for snapshot in node.snapshots:
            yield tokens[: snapshot.end * cache.page_size], snapshot.row


def check_states(
    engine: LocalEngine, models: tuple[Path, Path], cache: CacheConfig, limit: int = 6, tolerance: float = 2e-4
) -> None:
    """Saved states equal those after a prompt of the same tokens. Inputs of later layers differ by a few float32 sums
    of up to 150 terms, 2e-5 of the largest number each; another text's state differs by about that number."""
    saved = list(saved_states(engine))[:limit]
    assert saved, "nothing was saved"
    executor = engine.executor
    assert isinstance(executor, Worker) and executor._batches._states is not None
    kept = executor._batches._states.states
    with local_engine(spec_of(models, "", dataclasses.replace(cache, prefix_cache=False))) as fresh:
        for tokens, row in saved:
            fresh.generate([tokens], SamplingParams(1, 0.0))
            assert isinstance(fresh.executor, Worker) and fresh.executor._batches._states is not None
            for ours, theirs in zip(kept, fresh.executor._batches._states.states, strict=True):
                for mine, other in ((ours.saved_state, theirs.state), (ours.saved_conv, theirs.conv)):
                    scale = float(other[:, 0].abs().max())
                    torch.testing.assert_close(
                        mine[:, row], other[:, 0], atol=tolerance * scale, rtol=0, check_dtype=False
                    )


@pytest.mark.parametrize("draft, page_size, snapshots", [("tree", 16, 10), *slow(("", 4, 40))])
def test_answers_are_those_without_a_cache(
    models: tuple[Path, Path], draft: str, page_size: int, snapshots: int
) -> None:
    cache = CacheConfig(page_size, num_pages=2400 // page_size, state_snapshots=snapshots, state_interval=16)
    different, saved = differences(models, draft, cache, 20, seed=1, captured=draft == "tree")
    assert different == 0
    assert saved > 0.05, f"only {saved:.0%} of the prompt tokens were found"


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 2.0**-8), *slow(("float32", 2e-4))])
def test_memory_of_saved_states_is_that_of_the_plan(
    models: tuple[Path, Path], dtype: Literal["float32", "bfloat16"], tolerance: float
) -> None:
    """A state of bfloat16 is rounded once, from a float32 one that was resumed at such a state."""
    cache = CacheConfig(4, num_pages=600, state_snapshots=40, state_interval=16, state_snapshot_dtype=dtype)
    with local_engine(spec_of(models, "", cache)) as engine:
        turns(engine, Conversations(3, VOCAB, MAX_LEN), 16, seed=3)
        check_states(engine, models, cache, tolerance=tolerance)
        layout = plan_engine(spec_of(models, "", cache)).layout
        assert isinstance(engine.executor, Worker) and engine.executor._batches._states is not None
        saved = [
            each for kept in engine.executor._batches._states.states for each in (kept.saved_state, kept.saved_conv)
        ]
        assert saved[0].dtype is getattr(torch, dtype)
        assert sum(each.nbytes for each in saved) == layout.bytes_per_snapshot * 40


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["", "chain", "tree"])
@pytest.mark.parametrize("page_size, snapshots, interval", [(1, 20, 16), (4, 5, 8), (16, 40, 32), (64, 12, 64)])
def test_no_answer_of_many_turns_differs(
    models: tuple[Path, Path], draft: str, page_size: int, snapshots: int, interval: int
) -> None:
    """10,000 turns and more over all settings."""
    num_pages = max(6, 1000 // page_size)
    cache = CacheConfig(page_size, num_pages=num_pages, state_snapshots=snapshots, state_interval=interval)
    different, saved = differences(models, draft, cache, 900, seed=page_size)
    assert different == 0, f"{different} of 900"
    assert saved > 0.05
