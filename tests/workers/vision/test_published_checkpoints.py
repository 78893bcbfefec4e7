"""Checkpoints of images by the names of tensors and fields that versions of transformers saved: the same tokens."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.speculative.build import EngineSpec, local_engine
from tests.support.slow import slow
from tests.support.targets.image_models import MAX_TOKENS, ImagePrompts, make_image_model
from tests.workers.vision.test_images_greedy import NUM_TOKENS, prompts, requests_of, worker_of

Rename = Callable[[str], str]


def qwen_since_4_52(name: str) -> str:
    if name.startswith("visual."):
        return f"model.{name}"
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def gemma_published(name: str) -> str:
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1)


def gemma_since_4_52(name: str) -> str:
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.", 1)
    return f"model.{gemma_published(name)}"


def flatten(folder: Path) -> None:
    """Write config.json as Qwen2-VL and Qwen2.5-VL were published: fields of the text beside those of the tower."""
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {name: value for name, value in text.items() if name not in ("model_type", "architectures", "dtype")}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}, "torch_dtype": "float32"}
    flat |= {"rope_theta": rope["rope_theta"]}
    del config["vision_config"]["model_type"], config["dtype"]
    (folder / "config.json").write_text(json.dumps(flat | config))


def test_a_flat_configuration(tmp_path: Path) -> None:
    check(tmp_path, "qwen2_5_vl", lambda name: name, flatten)


@pytest.mark.parametrize(
    ("kind", "rename"),
    [
        ("qwen2_5_vl", qwen_since_4_52),
        ("gemma3", gemma_published),
        *slow(("qwen2_vl", qwen_since_4_52), ("gemma3", gemma_since_4_52)),
    ],
)
def test_names_of_tensors(tmp_path: Path, kind: str, rename: Rename) -> None:
    check(tmp_path, kind, rename)


def unchanged(folder: Path) -> None:
    """Leave config.json as it is."""


def check(folder: Path, kind: str, rename: Rename, change: Callable[[Path], None] = unchanged) -> None:
    """Compare tokens of a changed checkpoint with those of transformers and the unchanged one."""
    torch.set_num_threads(1)
    model, of = make_image_model(folder, kind), ImagePrompts(folder)
    expected = [of.by_transformers(model, parts, NUM_TOKENS) for parts in prompts()[:3]]
    tensors = load_file(folder / "model.safetensors")
    assert change is not unchanged or any(rename(name) != name for name in tensors)
    save_file({rename(name): each for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    change(folder)
    with local_engine(EngineSpec(worker_of(folder, step_tokens=2 + MAX_TOKENS.get(kind, 25)), None)) as engine:
        requests = requests_of(folder, prompts()[:3])
        engine.run(requests, 4)
        assert [request.output for request in requests] == expected
