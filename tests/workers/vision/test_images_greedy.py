"""Images in prompts: greedy tokens equal to those of transformers' processor and model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import GraphCapture, ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.models.loading import read_target_config
from aerie.workers.runner.batch import StepBatch
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import SamplingParams
from aerie.workers.scheduling.request import Request
from tests.speculative.test_graphs_while_serving import TOKENS
from tests.support.kernels.eager_graphs import LazyRecorder
from tests.support.target_answers import CHAIN, TREE, head_for
from tests.support.targets.image_models import ImagePrompts, make_image_model, picture

NUM_TOKENS = 14
GREEDY = SamplingParams(NUM_TOKENS, 0.0)


def prompts() -> list[list[Any]]:
    """None, one, two and three pictures of several sizes; the third prompt goes on after an answer."""
    first, second, wide = picture(1, 40, 40), picture(2, 24, 33), picture(3, 64, 16)
    return [
        [5, 6, 7, 8, 9, 10, 11],
        [5, 6, first, 7, 8],
        [5, 6, first, 7, 8, 20, 21, 22, 9, second, 30],
        [wide, second, 12, first],
        [5, 6, second, 7, 8],
    ]


def worker_of(folder: Path, num_pages: int = 300, ranks: int = 1) -> WorkerConfig:
    """Steps of 24 prompt tokens, so that chunks end within images."""
    return WorkerConfig(
        ModelSource(path=str(folder), device="cpu"),
        CacheConfig(page_size=4, num_pages=num_pages, state_snapshots=32),
        SchedulerConfig(max_running=4, max_step_tokens=24),
        tensor_parallel=ranks,
        measure_costs=False,
        debug=True,
    )


def requests_of(folder: Path, given: Sequence[Sequence[Any]], turn: int = 0) -> list[Request]:
    of = ImagePrompts(folder)
    found = [of.of(parts) for parts in given]
    return [Request(f"{turn}-{i}", ids, GREEDY, inputs=inputs) for i, (ids, inputs) in enumerate(found)]


@pytest.mark.parametrize("kind", ["qwen2_5_vl"])
def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """Alone, together, from cached pages, and with too few pages for all requests."""
    torch.set_num_threads(1)
    model = make_image_model(tmp_path, kind)
    of = ImagePrompts(tmp_path)
    expected = [of.by_transformers(model, parts, NUM_TOKENS) for parts in prompts()]
    assert expected[1] != expected[4], "answers depend on the picture"
    with local_engine(EngineSpec(worker_of(tmp_path), None)) as engine:
        for turn in range(2):
            requests = requests_of(tmp_path, prompts(), turn)
            engine.run(requests, 1 if turn else 4)
            assert [request.output for request in requests] == expected
        assert all(request.cached_tokens >= len(request.prompt) - 5 for request in requests)
    with local_engine(EngineSpec(worker_of(tmp_path, num_pages=30), None)) as engine:
        requests = requests_of(tmp_path, prompts())
        engine.run(requests, 4)
        assert [request.output for request in requests] == expected
        assert sum(request.num_preemptions for request in requests) > 0


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", "qwen2_vl"])
def test_other_families(tmp_path: Path, kind: str) -> None:
    """DeepStack, recurrent layers, and a tower without windows; then on two ranks with copied drafts."""
    torch.set_num_threads(1)
    model = make_image_model(tmp_path, kind)
    of = ImagePrompts(tmp_path)
    expected = [of.by_transformers(model, parts, NUM_TOKENS) for parts in prompts()]
    assert expected[1] != expected[4]
    for ranks, speculative in ((1, None), (2, SpeculativeConfig(method="suffix"))):
        with local_engine(EngineSpec(worker_of(tmp_path, ranks=ranks), speculative)) as engine:
            for turn in range(2):
                requests = requests_of(tmp_path, prompts(), turn)
                engine.run(requests, 4)
                assert [request.output for request in requests] == expected


@pytest.mark.parametrize(("shape", "ranks"), [(CHAIN, 1), (TREE, 2)])
def test_drafts_change_no_token(tmp_path: Path, shape: tuple[int, int, int], ranks: int) -> None:
    """An EAGLE-3 head, which sees the placeholders' ids."""
    torch.set_num_threads(1)
    target = tmp_path / "target"
    model = make_image_model(target, "qwen3_vl")
    head = head_for(read_target_config(ModelSource(path=str(target)), 1), tmp_path)
    of = ImagePrompts(target)
    expected = [of.by_transformers(model, parts, NUM_TOKENS) for parts in prompts()]
    with local_engine(
        EngineSpec(worker_of(target, 40, ranks), SpeculativeConfig(str(head), "eagle3", *shape))
    ) as engine:
        requests = requests_of(target, prompts())
        engine.run(requests, 4)
        assert [request.output for request in requests] == expected
        assert sum(request.num_draft_tokens for request in requests) > 0


@pytest.mark.parametrize("shape", [None, TREE])
def test_rounds_after_images_are_captured(tmp_path: Path, shape: tuple[int, int, int] | None) -> None:
    """Only steps with images, or with positions in their prompt chunks, run eagerly: the rounds of all requests are
    replays, whose slots have different distances of positions."""
    torch.set_num_threads(1)
    target = tmp_path / "target"
    model = make_image_model(target, "qwen2_5_vl")
    of = ImagePrompts(target)
    expected = [of.by_transformers(model, parts, NUM_TOKENS) for parts in prompts()]
    speculative = None
    if shape is not None:
        head = head_for(read_target_config(ModelSource(path=str(target)), 1), tmp_path)
        speculative = SpeculativeConfig(str(head), "eagle3", *shape)
    with local_engine(EngineSpec(worker_of(target), speculative)) as engine:
        worker, recorder = engine.executor, LazyRecorder()
        assert isinstance(worker, Worker)
        eager = list[StepBatch]()
        graphs = GraphedDecoding(worker._strategy, worker._slots, (1, 2, 4), 256, recorder, TOKENS)
        with torch.inference_mode():
            graphs.capture(GraphCapture(limit_s=1e9), SOLO)
        step = graphs.step

        def noted(batch: StepBatch, fill: Any = None) -> Any:
            before = recorder.num_replays
            out = step(batch, fill)
            if recorder.num_replays == before:
                eager.append(batch)
            return out

        graphs.step = noted  # type: ignore[method-assign]
        worker._strategy = graphs
        for turn in range(2):
            requests = requests_of(target, prompts(), turn)
            engine.run(requests, 4)
            assert [request.output for request in requests] == expected
        assert eager and all(each.chunks is not None for each in eager)
        assert recorder.num_replays > 20
