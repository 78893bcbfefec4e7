"""Layers with a window in a pool that has hardly more than the windows of running requests: window pages change owners
all the time, and no token changes."""

from pathlib import Path

import pytest

from aerie.speculative.build import EngineSpec, local_engine
from aerie.workers.engine_layout import EngineLayout
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import FinishReason
from tests.speculative.requests.test_not_finite import POISON, outputs, run, target_of
from tests.support.simulation.integrity import check_queues
from tests.support.slow import slow
from tests.support.target_answers import CHAIN, TREE, drafted
from tests.support.tiny_models import make_target
from tests.workers.models.test_targets import by_transformers, prompts, worker_of

WINDOW = 12  # prompts have up to 90 tokens, chunks up to 32
KINDS: dict[str, dict[str, int]] = {"GptOss": {}, "Mistral": {"sliding_window": WINDOW}}  # in some layers, in all
GREEDY = SamplingParams(16, 0.0)


@pytest.fixture(autouse=True)
def few_window_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineLayout, "_windows_of_requests", lambda layout: 2 * layout.window_pages(WINDOW))
    monkeypatch.setattr(EngineLayout, "_cached_windows", lambda layout, num_pages: 3)


def spec(target: Path, head: Path, shape: tuple[int, int, int] | None) -> EngineSpec:
    return EngineSpec(worker_of(target), None if shape is None else drafted(target, head, shape))


@pytest.mark.parametrize(
    "name,shape",
    [("GptOss", TREE), *slow(("GptOss", None), ("Mistral", CHAIN), ("Mistral", TREE))],
    ids=lambda value: f"{value}",
)
def test_windows_that_take_each_others_pages_change_no_token(
    tmp_path: Path, name: str, shape: tuple[int, int, int] | None
) -> None:
    target = make_target(tmp_path / "target", architecture=name, **KINDS[name])
    expected = by_transformers(target)
    with local_engine(spec(target, tmp_path / "head", shape)) as engine:
        allocator, worker = engine.scheduler.allocator, engine.executor
        assert allocator.windows is not None and isinstance(worker, Worker)
        pool = worker._strategy._target.pool  # type: ignore[attr-defined]
        rows = {
            tensors[0].shape[1] for group, tensors in zip(pool.groups, pool.tensors, strict=True) if group.keeps_window
        }
        assert rows == {allocator.windows.num_window_pages + 1} and max(rows) < 50 < allocator.num_pages
        found = engine.generate(prompts() * 3, GREEDY, 4)
        assert [request.output for request in found] == expected * 3
        first, second = engine.generate([prompts()[2]] * 2, GREEDY, 1)
        assert first.output == second.output == expected[2] and second.cached_tokens == 88  # of 90
        assert allocator.windows.num_available == allocator.windows.num_window_pages
        check_queues(engine.scheduler.queues)


def test_nan_in_a_window_page_does_not_reach_its_next_owner(tmp_path: Path) -> None:
    """A prompt's first chunks have left their window pages to others when its logits turn out to be NaN."""
    target = make_target(tmp_path / "target", architecture="Ministral", sliding_window=WINDOW)
    healthy = [[token % POISON for token in prompt] for prompt in prompts()] * 2
    hurt = [[POISON, *prompt] for prompt in healthy]
    with local_engine(spec(target, tmp_path, None)) as engine:
        target_of(engine).lm_head.method.dense_weight().data[POISON] = 0.0  # type: ignore[attr-defined]
        expected = outputs(run(engine, healthy, GREEDY, "before"))
        target_of(engine).embed_tokens.weight.data[POISON] = float("nan")
        mixed = [prompt for pair in zip(hurt, healthy, strict=True) for prompt in pair]
        last = run(engine, mixed, GREEDY, "beside")
        ended = [output.finish_reason is FinishReason.ERROR for _, output in sorted(last.items())]
        assert sum(ended) == len(hurt)
        beside = [output for output in last.values() if output.request.prompt[0] != POISON]
        assert sorted(each.request.output for each in beside) == sorted(expected)
        assert outputs(run(engine, healthy, GREEDY, "after")) == expected
