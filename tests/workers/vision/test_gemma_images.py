"""Images in Gemma 3 and 4, whose tokens attend to later ones of their image: greedy tokens equal to those of
transformers' processor and model."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.speculative.build import EngineSpec, local_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.models.loading import read_target_config
from aerie.workers.runner.deterministic import refusal
from tests.support.drafts.gemma4_assistant import make_assistant
from tests.support.slow import slow
from tests.support.target_answers import CHAIN, TREE, head_for
from tests.support.targets.image_models import MAX_TOKENS, ImagePrompts, make_image_model, picture
from tests.workers.vision.test_images_greedy import NUM_TOKENS, prompts, requests_of, worker_of

KINDS = ["gemma3", "gemma4"]


def worker(folder: Path, kind: str, num_pages: int = 300, ranks: int = 1) -> Any:
    """Steps that have one whole image, and no two."""
    return worker_of(folder, num_pages, ranks, 2 + MAX_TOKENS.get(kind, 25))


def answers(folder: Path, kind: str) -> list[list[int]]:
    torch.set_num_threads(1)
    model, of = make_image_model(folder, kind), ImagePrompts(folder)
    expected = [of.by_transformers(model, parts, NUM_TOKENS) for parts in prompts()]
    assert expected[1] != expected[4], "answers depend on the picture"
    return expected


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """Together, alone from cached pages, and with too few pages for all requests."""
    expected = answers(tmp_path, kind)
    with local_engine(EngineSpec(worker(tmp_path, kind), None)) as engine:
        for turn in range(2):
            requests = requests_of(tmp_path, prompts(), turn)
            engine.run(requests, 1 if turn else 4)
            assert [request.output for request in requests] == expected
        assert all(request.cached_tokens >= len(request.prompt) - 5 for request in requests)
    with local_engine(EngineSpec(worker(tmp_path, kind, 70 if kind == "gemma4" else 32), None)) as engine:
        requests = requests_of(tmp_path, prompts())
        engine.run(requests, 4)
        assert [request.output for request in requests] == expected
        assert sum(request.num_preemptions for request in requests) > 0


@pytest.mark.parametrize(
    ("kind", "shape", "ranks"), [("gemma4", CHAIN, 1), *slow(("gemma3", TREE, 2), ("gemma4", TREE, 2))]
)
def test_drafts_and_ranks_change_no_token(tmp_path: Path, kind: str, shape: tuple[int, int, int], ranks: int) -> None:
    target = tmp_path / "target"
    expected = answers(target, kind)
    one = worker(target, kind, ranks=ranks)
    head = head_for(read_target_config(one.model, 1), tmp_path)
    for speculative in (SpeculativeConfig(str(head), "eagle3", *shape), SpeculativeConfig(method="suffix")):
        with local_engine(EngineSpec(one, speculative)) as engine:
            for turn in range(2):
                requests = requests_of(target, prompts(), turn)
                engine.run(requests, 4)
                assert [request.output for request in requests] == expected
            assert sum(request.num_draft_tokens for request in requests) > 0


def test_an_assistant_changes_no_token(tmp_path: Path) -> None:
    """Gemma 4's own draft, over the target's KV of images, on two ranks."""
    target = tmp_path / "target"
    expected, one = answers(target, "gemma4"), worker(target, "gemma4", ranks=2)
    assistant = make_assistant(tmp_path / "assistant", target)
    with local_engine(EngineSpec(one, SpeculativeConfig(str(assistant), "mtp", *TREE))) as engine:
        for turn in range(2):
            requests = requests_of(target, prompts(), turn)
            engine.run(requests, 4)
            assert [request.output for request in requests] == expected
        assert sum(request.num_draft_tokens for request in requests) > 0


def test_a_prefix_that_ends_within_an_image_is_continued(tmp_path: Path) -> None:
    """The pages of an image's first tokens are cached, those of its last ones are not."""
    torch.set_num_threads(1)
    model, of = make_image_model(tmp_path, "gemma3"), ImagePrompts(tmp_path)
    image, one = picture(1, 40, 40), worker(tmp_path, "gemma3")
    one = dataclasses.replace(one, cache=dataclasses.replace(one.cache, page_size=16))
    with local_engine(EngineSpec(one, None)) as engine:
        for i, parts in enumerate(([5, image], [5, image, 7, 8, 9], [5, image, 20])):
            (request,) = requests_of(tmp_path, [parts], i)
            engine.run([request], 1)
            assert request.output == of.by_transformers(model, parts, NUM_TOKENS)
            assert request.cached_tokens == (16 if i else 0), "within the image"


def test_what_images_exclude_is_refused(tmp_path: Path) -> None:
    make_image_model(tmp_path, "gemma3")
    with pytest.raises(ValueError, match="max_step_tokens=24: a step computes all 25 tokens of an image"):
        local_engine(EngineSpec(worker_of(tmp_path), None)).__enter__()
    one = worker(tmp_path, "gemma3")
    target = read_target_config(one.model, 1)
    assert "set model.images: off" in (refusal(one, target, torch.bfloat16) or "")
    off = dataclasses.replace(one, model=dataclasses.replace(one.model, images="off"))
    assert "images" not in (refusal(off, target, torch.bfloat16) or "")
