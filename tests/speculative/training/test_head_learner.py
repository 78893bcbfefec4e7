"""Heads that learn from the texts that an engine has written: acceptance rises, and texts stay."""

import threading
from pathlib import Path

import pytest
import torch

from aerie.cluster.learning.gate import gain_of
from aerie.speculative.build import local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.speculative.training.head_learner import HeadLearner
from aerie.workers.runner.local_engine import LocalEngine
from aerie.workers.scheduling.commands.command import Folder, LoadWeights
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.speculative.commands.test_weight_updates import loaded
from tests.speculative.conftest import Pair, forked_ranks, make_pair, one_thread  # noqa: F401 - fixtures
from tests.support.drafts.block_reference import head_for, make_block_head

PROMPTS = [[2 + i, 3 + i % 7, 9 - i % 5] for i in range(48)]


@pytest.fixture(scope="module")
def random_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("learning"))


def answers(engine: LocalEngine, name: str) -> tuple[list[list[int]], float]:
    """The texts, half of them sampled, and the accepted tokens of a round."""
    requests = [
        Request(f"{name}{i}", prompt, SamplingParams(24, 0.7 * (i % 2), seed=i)) for i, prompt in enumerate(PROMPTS)
    ]
    engine.run(requests, 4)
    histograms = [request.acceptance_histogram for request in requests]
    accepted = sum(k * count for histogram in histograms for k, count in enumerate(histogram))
    return [request.output for request in requests], accepted / sum(map(sum, histograms))


@pytest.mark.parametrize("method", ["eagle3", pytest.param("dflash", marks=pytest.mark.slow)])
def test_a_random_head_learns_and_is_published_beside_running_requests(
    random_pair: Pair, method: str, tmp_path: Path
) -> None:
    draft = random_pair.eagle3
    if method == "dflash":
        draft = make_block_head(tmp_path / "head", random_pair.target, head_for(random_pair.target))
    speculative = SpeculativeConfig(str(draft), method, 3, 1, 4, adaptive=False)  # type: ignore[arg-type]
    with local_engine(random_pair.spec(speculative)) as engine:
        texts, before = answers(engine, "a")
        learner = HeadLearner(random_pair.target, draft, method, 3e-3, 512, 3)
        pairs = list(zip(PROMPTS, texts, strict=True))
        first, last = learner.train(pairs[:32], 20), [learner.train(pairs[:32], 40) for _ in range(4)][-1]
        assert last < first
        found = gain_of(*learner.rounds(pairs[32:]))
        assert found.low > 0.05, "texts that it has not seen"
        learner.save(tmp_path / "draft-1")
        work = LoadWeights(draft=Folder(str(tmp_path / "draft-1")), version="draft 1", is_learned=True)
        assert loaded(engine, work).missing == {"draft": ()}
        assert (engine.scheduler.weights.epoch, engine.scheduler.weights.version) == (0, "")
        again, after = answers(engine, "b")
        assert again == texts and after > 1.2 * before + 0.1
        learner.reset(tmp_path / "draft-1")
        served, trained = learner.rounds(pairs[32:])
        assert served == trained
        learner.train(pairs[:32], 20)
        _, trained = learner.rounds(pairs[32:])
        learner.compare_with(draft)
        compared = learner.rounds(pairs[32:])
        assert compared[1] == trained, "it trains on"
        assert gain_of(*compared).low > 0.05, "and is compared with other weights"


def test_training_waits_before_each_operation_and_comes_to_the_same_head(random_pair: Pair) -> None:
    """Also in the backward pass: the wait is called more often than there are modules to run forwards."""
    pairs = [(prompt, [3 + i % 5 for i in range(12)]) for prompt in PROMPTS[:8]]
    waits = []
    paused, other = (
        HeadLearner(random_pair.target, random_pair.eagle3, "eagle3", 3e-3, 256, 3, wait)
        for wait in (lambda: waits.append(threading.get_ident()), None)
    )
    paused.train(pairs, 1)
    assert len(waits) > 500 and set(waits) == {threading.get_ident()}
    before = len(waits)
    assert paused.rounds(pairs)[1] and len(waits) > before + 100
    other.train(pairs, 1)
    assert all(map(torch.equal, paused._head.parameters(), other._head.parameters()))
