"""Images in prompts: greedy tokens equal to those of transformers' processor and model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, local_engine, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import GraphCapture, ModelSource, SchedulerConfig, WorkerConfig
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.models.loading import read_target_config
from aerie.workers.prompt_inputs import Image
from aerie.workers.runner import layout
from aerie.workers.runner.batch import StepBatch
from aerie.workers.runner.costs.cost_probe import probe_costs
from aerie.workers.runner.graphs.cuda_graph import GraphedDecoding
from aerie.workers.runner.worker import Worker
from aerie.workers.scheduling.plan import SamplingParams, StepPlan
from aerie.workers.scheduling.request import Request
from aerie.workers.vision.tower import VisionTower
from tests.speculative.test_graphs_while_serving import TOKENS
from tests.support.kernels.eager_graphs import LazyRecorder
from tests.support.simulation.states import COSTS
from tests.support.slow import slow
from tests.support.target_answers import CHAIN, TREE, head_for
from tests.support.targets.image_models import ImagePrompts, make_image_model, picture
from tests.support.tiny_models import add_qwen_mtp

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


def worker_of(folder: Path, num_pages: int = 300, ranks: int = 1, step_tokens: int = 24) -> WorkerConfig:
    """Steps of few prompt tokens, so that chunks end within images."""
    return WorkerConfig(
        ModelSource(path=str(folder), device="cpu"),
        CacheConfig(page_size=4, num_pages=num_pages, state_snapshots=32),
        SchedulerConfig(max_running=4, max_step_tokens=step_tokens),
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


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", *slow("qwen2_vl", "qwen3_vl_moe", "qwen3_5_moe")])
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


@pytest.mark.parametrize("method", ["mtp", *slow("suffix")])
def test_an_own_mtp_module_changes_no_token(tmp_path: Path, method: Any) -> None:
    """A hybrid's module, whose prompts have images at KV positions, while the target's have three."""
    torch.set_num_threads(1)
    model = make_image_model(tmp_path, "qwen3_5")
    of = ImagePrompts(tmp_path)
    expected = [of.by_transformers(model, parts, NUM_TOKENS) for parts in prompts()]
    add_qwen_mtp(tmp_path)
    speculative = SpeculativeConfig("", method, *TREE) if method == "mtp" else SpeculativeConfig(method=method)
    with local_engine(EngineSpec(worker_of(tmp_path), speculative)) as engine:
        for turn in range(2):
            requests = requests_of(tmp_path, prompts(), turn)
            engine.run(requests, 4)
            assert [request.output for request in requests] == expected


def graphed(worker: Worker, recorder: LazyRecorder) -> tuple[GraphedDecoding, list[StepBatch]]:
    """Return the worker's strategy in graphs, all captured, and a list of the batches that it runs without one."""
    tower, has_states = worker._batches._tower, worker._batches._states is not None
    assert tower is not None
    values = tower.row_buffer(TOKENS[-1]).fill_(torch.nan)
    graphs = GraphedDecoding(
        worker._strategy, worker._slots, (1, 2, 4), 256, recorder, TOKENS, has_states=has_states, image_values=values
    )
    with torch.inference_mode():
        graphs.capture(GraphCapture(limit_s=1e9), SOLO)
    eager, step = list[StepBatch](), graphs.step

    def noted(batch: StepBatch, fill: Any = None) -> Any:
        before = recorder.num_replays
        out = step(batch, fill)
        if recorder.num_replays == before:
            eager.append(batch)
        return out

    graphs.step = noted  # type: ignore[method-assign]
    return graphs, eager


@pytest.mark.parametrize(
    ("kind", "shape"), [("qwen2_5_vl", None), ("qwen3_vl", TREE), *slow(("qwen3_5", None), ("qwen2_5_vl", TREE))]
)
def test_steps_with_images_are_captured(tmp_path: Path, kind: str, shape: tuple[int, int, int] | None) -> None:
    """Every step is a replay: of rounds, whose slots have different distances of positions, and of prompt chunks with
    and without images, beside rounds or alone."""
    torch.set_num_threads(1)
    target = tmp_path / "target"
    model = make_image_model(target, kind)
    of = ImagePrompts(target)
    expected = [of.by_transformers(model, parts, NUM_TOKENS) for parts in prompts()]
    speculative = None
    if shape is not None:
        head = head_for(read_target_config(ModelSource(path=str(target)), 1), tmp_path)
        speculative = SpeculativeConfig(str(head), "eagle3", *shape)
    with local_engine(EngineSpec(worker_of(target), speculative)) as engine:
        worker, recorder = engine.executor, LazyRecorder()
        assert isinstance(worker, Worker)
        graphs, eager = graphed(worker, recorder)
        worker._strategy = graphs
        for turn in range(2):
            requests = requests_of(target, prompts(), turn)
            engine.run(requests, 4)
            assert [request.output for request in requests] == expected
        assert not eager and recorder.num_replays > 20


@pytest.mark.parametrize("kind", ["qwen2_5_vl", *slow("qwen3_5")])
def test_all_measured_steps_are_captured(tmp_path: Path, kind: str) -> None:
    """Those with prompt chunks, too, whose rows have three positions."""
    torch.set_num_threads(1)
    make_image_model(tmp_path, kind)
    spec = EngineSpec(worker_of(tmp_path))
    with local_engine(spec) as engine:
        worker, recorder = engine.executor, LazyRecorder()
        assert isinstance(worker, Worker)
        graphs, eager = graphed(worker, recorder)
        with torch.inference_mode():
            costs = probe_costs(
                graphs, worker._slots, SOLO, plan_engine(spec).layout, 4, graphs.token_buckets, worker._batches._states
            )
        assert not eager and costs.chunk_ms


@pytest.mark.parametrize("cache_bytes", [1 << 28, 10_000])
def test_an_image_is_encoded_once_while_it_is_kept(
    tmp_path: Path, cache_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 bytes hold one of these images: the scheduler sends the pixels again exactly when ranks lack them."""
    torch.set_num_threads(1)
    model = make_image_model(tmp_path, "qwen2_5_vl")
    of, encoded = ImagePrompts(tmp_path), list[bytes]()
    expected = [of.by_transformers(model, parts, NUM_TOKENS) for parts in prompts()]
    sizes_of, encode = layout.image_sizes, VisionTower.encode
    monkeypatch.setattr(
        layout, "image_sizes", lambda *given: msgspec.structs.replace(sizes_of(*given), cache_bytes=cache_bytes)
    )

    def counted(tower: VisionTower, image: Image) -> Tensor:
        encoded.append(image.digest)
        return encode(tower, image)

    monkeypatch.setattr(VisionTower, "encode", counted)
    with local_engine(EngineSpec(worker_of(tmp_path, ranks=1), None)) as engine:
        encoded.clear()  # the warm-up's
        for turn in range(2):
            engine.scheduler.flush_prefix_cache()
            requests = requests_of(tmp_path, prompts(), turn)
            engine.run(requests, 4)
            assert [request.output for request in requests] == expected
    assert len(set(encoded)) == 3
    assert len(encoded) == 3 if cache_bytes > 10_000 else len(encoded) > 6


@pytest.mark.parametrize(("kind", "ranks"), [("qwen3_vl", 2), ("gemma3", 1), ("gemma4", 1)])
def test_an_image_is_encoded_in_parts_between_rounds(tmp_path: Path, kind: str, ranks: int) -> None:
    """Where an image takes 100 ms by the cost table and a step may take 13, every step has rounds, and a layer."""
    torch.set_num_threads(1)
    model, plans = make_image_model(tmp_path, kind), list[StepPlan]()
    of = ImagePrompts(tmp_path)
    given = [[7, 8, 9], *prompts()[1:]]
    expected = [of.by_transformers(model, parts, 80 if i == 0 else NUM_TOKENS) for i, parts in enumerate(given)]
    with local_engine(EngineSpec(worker_of(tmp_path, ranks=ranks, step_tokens=80), None)) as engine:
        engine.scheduler.use_costs(msgspec.structs.replace(COSTS, image_patches=(16, 640), image_ms=(100.0, 100.0)))
        schedule = engine.scheduler.schedule

        def noted() -> StepPlan | None:
            plan = schedule()
            if plan is not None:
                plans.append(plan)
            return plan

        engine.scheduler.schedule = noted  # type: ignore[method-assign]
        requests = requests_of(tmp_path, given)
        requests[0].sampling = SamplingParams(80, 0.0)
        engine.run(requests, 2)
        assert [request.output for request in requests] == expected
    parts = [plan for plan in plans if plan.encodings]
    assert len(parts) == 4, "two pictures in two parts each; the first one of three came before any round"
    assert all(plan.slots for plan in parts), "beside rounds"
