"""Requests with images in engines of all kinds: with LoRA adapters, with block heads, on two ranks, with too few pages,
after a loss of ranks, and beside an abort. Tokens are those of transformers, or of peft's merged model."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import LoraConfig
from tests.support.drafts.block_reference import BlockHead, speculators
from tests.support.drafts.eagle3_reference import save_head
from tests.support.simulation.states import COSTS
from tests.support.slow import slow
from tests.support.targets.image_models import MAX_TOKENS, ImagePrompts, make_image_model, picture
from tests.workers.vision.test_images_greedy import NUM_TOKENS, prompts, requests_of, worker_of


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def answers(folder: Path, kind: str) -> list[list[int]]:
    model, of = make_image_model(folder, kind), ImagePrompts(folder)
    return [of.by_transformers(model, parts, NUM_TOKENS) for parts in prompts()]


@pytest.mark.parametrize(("kind", "pages"), [("qwen3_5", 24), *slow(("qwen3_vl", 30), ("qwen3_5_moe", 24))])
def test_preempted_requests_with_images_go_on(tmp_path: Path, kind: str, pages: int) -> None:
    """The states of a hybrid are computed again, and the inner features of DeepStack are added again."""
    expected = answers(tmp_path, kind)
    with local_engine(EngineSpec(worker_of(tmp_path, num_pages=pages), None)) as engine:
        requests = requests_of(tmp_path, prompts())
        engine.run(requests, 4)
        assert [request.output for request in requests] == expected
        assert sum(request.num_preemptions for request in requests) > 0


@pytest.mark.parametrize("kind", ["qwen2_5_vl", *slow("qwen2_vl")])
def test_two_ranks_give_the_tokens_of_transformers(tmp_path: Path, kind: str) -> None:
    expected = answers(tmp_path, kind)
    with local_engine(EngineSpec(worker_of(tmp_path, ranks=2), None)) as engine:
        for turn in range(2):
            requests = requests_of(tmp_path, prompts(), turn)
            engine.run(requests, 4)
            assert [request.output for request in requests] == expected


@pytest.mark.parametrize(
    ("kind", "head"), [("qwen3_vl", "dflash"), *slow(("qwen3_5", "dspark"), ("gemma3", "dflash2"))]
)
def test_block_heads_change_no_token(tmp_path: Path, kind: str, head: Any) -> None:
    expected = answers(tmp_path / "target", kind)
    made = BlockHead(kind=head, num_captured=3, in_speculators=True)
    folder = save_head(tmp_path / "head", speculators(made, [1, 2, 3]), made.tensors())
    one = worker_of(tmp_path / "target", step_tokens=2 + 25)
    with local_engine(EngineSpec(one, SpeculativeConfig(str(folder), head))) as engine:
        for turn in range(2):
            requests = requests_of(tmp_path / "target", prompts(), turn)
            engine.run(requests, 4)
            assert [request.output for request in requests] == expected
        assert sum(request.num_draft_tokens for request in requests) > 0


def test_new_ranks_encode_the_images_of_the_lost_ones(tmp_path: Path) -> None:
    """Requests whose prompts are computed, being computed and waiting."""
    expected, spec = answers(tmp_path, "qwen3_vl"), EngineSpec(worker_of(tmp_path), None)
    with local_engine(spec) as engine, local_engine(spec) as successor:
        requests = requests_of(tmp_path, prompts())
        for request in requests:
            engine.scheduler.submit(request)
        while not any(request.output for request in requests):
            engine.step()
        engine.executor = successor.executor
        engine.scheduler.requeue_all(epoch=1)
        while engine.scheduler.num_running or engine.scheduler.num_waiting:
            engine.step()
        assert [request.output for request in requests] == expected


def test_an_abort_within_an_image_disturbs_no_other_request(tmp_path: Path) -> None:
    """An image takes 100 ms and a step may take 13: the aborted request's image has been encoded in part. The next
    request has the same one, the last one another."""
    expected = answers(tmp_path, "qwen3_vl")
    with local_engine(EngineSpec(worker_of(tmp_path, step_tokens=80), None)) as engine:
        scheduler = engine.scheduler
        scheduler.use_costs(msgspec.structs.replace(COSTS, image_patches=(16, 640), image_ms=(100.0, 100.0)))
        beside, aborted = requests_of(tmp_path, [prompts()[0], prompts()[1]])
        beside.sampling = msgspec.structs.replace(beside.sampling, max_tokens=200)
        scheduler.submit(beside)
        while not beside.output:
            engine.step()
        scheduler.submit(aborted)
        while not (chunks := _image_chunks(scheduler))._partial:
            engine.step()
        scheduler.abort(aborted.request_id)
        again = requests_of(tmp_path, [prompts()[4], prompts()[1]], 1)
        for request in again:
            scheduler.submit(request)
        while not all(len(request.output) == NUM_TOKENS for request in again):
            engine.step()
        assert not chunks._partial
    assert [request.output for request in again] == [expected[4], expected[1]]


def _image_chunks(scheduler: Any) -> Any:
    return scheduler._prefill._images


TEXT_LAYERS = r"(?!.*(visual|vision)).*(q|k|v|o|gate|up|down)_proj"  # as trainers of vision models write it
Rename = Callable[[str], str]
OF_TRANSFORMERS_4 = {"qwen2_5_vl": "model.layers.", "gemma3": "language_model.model.layers."}


def make_adapter(folder: Path, target: Path, seed: int) -> Any:
    """Save a random adapter of a model's text part. Return the model that peft merges."""
    base: Any = AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(seed)
    model: Any = get_peft_model(base, PeftConfig(r=4, lora_alpha=8, target_modules=TEXT_LAYERS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(str(folder))
    return model.merge_and_unload()


def renamed(source: Path, folder: Path, rename: Rename) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    tensors = load_file(source / "adapter_model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def names_of(kind: str) -> Iterator[tuple[str, Rename]]:
    """Yield names of layers that adapters of a kind of model have."""
    yield "now", lambda name: name
    old = OF_TRANSFORMERS_4.get(kind, "model.layers.")  # of the text model alone
    yield "before", lambda name: name.replace("model.language_model.layers.", old)
    yield "bare", lambda name: name.removeprefix("base_model.model.")


@pytest.mark.parametrize(
    ("kind", "ranks"), [("qwen2_5_vl", 1), ("gemma3", 1), *slow(("qwen2_5_vl", 2), ("qwen3_5", 1), ("gemma4", 2))]
)
def test_adapters_change_answers_to_images_as_merged_models_do(tmp_path: Path, kind: str, ranks: int) -> None:
    """Beside requests without an adapter, of the same images, twice; by names of several versions of transformers."""
    target, given = tmp_path / "target", [prompts()[i] for i in (1, 2, 4)]
    models, of = {"": make_image_model(target, kind)}, ImagePrompts(target)
    models["now"] = make_adapter(tmp_path / "adapter", target, 3)
    found = {name: [of.by_transformers(model, parts, NUM_TOKENS) for parts in given] for name, model in models.items()}
    assert found[""][0] != found["now"][0] != found["now"][2], "answers depend on adapter and picture"
    folders = {name: str(renamed(tmp_path / "adapter", tmp_path / name, each)) for name, each in names_of(kind)}
    one = worker_of(target, 400, ranks, 2 + MAX_TOKENS.get(kind, 25))
    with local_engine(EngineSpec(dataclasses.replace(one, lora=LoraConfig(folders, 3, 16)), None)) as engine:
        for turn in range(2):
            jobs = []
            for name in ("", *folders):
                for i, request in enumerate(requests_of(target, given, turn)):
                    request.request_id += f"-{name}"
                    request.sampling = msgspec.structs.replace(request.sampling, adapter=name)
                    jobs.append((request, found[name and "now"][i]))
            engine.run([request for request, _ in jobs], 4)
            assert [request.output for request, _ in jobs] == [expected for _, expected in jobs]
        assert sum(request.cached_tokens for request, _ in jobs) > 0


def test_adapters_of_towers_are_refused_by_name(tmp_path: Path) -> None:
    """As peft saves them by default for a vision model, with a pattern that also fits its tower."""
    target = tmp_path / "target"
    make_image_model(target, "qwen2_5_vl")
    base: Any = AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32)
    model: Any = get_peft_model(base, PeftConfig(r=4, target_modules="all-linear"))
    model.save_pretrained(str(tmp_path / "adapter"))

    one = dataclasses.replace(worker_of(target), lora=LoraConfig({"all": str(tmp_path / "adapter")}))
    with pytest.raises(ValueError, match=r"visual\.blocks\.0\.attn\.proj is of a layer .*merge it into its base"):
        local_engine(EngineSpec(one, None)).__enter__()


def test_pictures_of_many_sizes(tmp_path: Path) -> None:
    """Thin, tiny, large and of odd sizes, several in a prompt."""
    model, of = make_image_model(tmp_path, "qwen2_5_vl"), ImagePrompts(tmp_path)
    sides = [(1, 1), (3, 200), (200, 3), (7, 9), (15, 17), (640, 480), (41, 39), (8, 1000)]
    given = [[5, picture(i, *each), 6, 7] for i, each in enumerate(sides)]
    given.append([part for i, each in enumerate(sides[:4]) for part in (picture(i, *each), 9)])
    expected = [of.by_transformers(model, parts, NUM_TOKENS) for parts in given]
    with local_engine(EngineSpec(worker_of(tmp_path, 500), None)) as engine:
        requests = requests_of(tmp_path, given)
        engine.run(requests, 4)
        assert [request.output for request in requests] == expected
