"""What every own class of a target must show: greedy answers equal to transformers' beside heads of random weights, on
two ranks, after cached prefixes, and with too few pages for all requests."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from speculative.config import SpeculativeConfig
from tests.support.tiny_models import make_eagle3
from tests.workers.models.test_targets import by_transformers, by_us, requests_of
from workers.config import ModelSource
from workers.models.loading import read_target_config

CHAIN, TREE = (3, 1, 4), (3, 4, 12)
FEW_PAGES = 40  # of 4 tokens: the longest request takes 27, all of them 54 and more


def check_trees_on_ranks(target: Path, head: Path, tensor_parallel: int = 2) -> None:
    """Compare trees of an EAGLE-3 head on several ranks, where requests must give way to each other."""
    tree = drafted(target, head, TREE)
    found = requests_of(target, tensor_parallel, tree, FEW_PAGES)
    assert [request.output for request in found] == by_transformers(target)
    assert sum(request.num_preemptions for request in found) > 0


def check_chains_and_cached_prefixes(target: Path, head: Path) -> None:
    """Compare chains of an EAGLE-3 head; and plain decoding of prompts that are asked twice."""
    expected = by_transformers(target)
    assert by_us(target, speculative=drafted(target, head, CHAIN)) == expected
    twice = requests_of(target, repeats=2)
    assert [request.output for request in twice] == expected * 2
    assert all(request.cached_tokens for request in twice[len(expected) + 1 :])  # the first prompt fills no page


def drafted(target: Path, head: Path, shape: tuple[int, int, int]) -> SpeculativeConfig:
    """A random head that also reads the output of the last layer."""
    ids = [0, 2, read_target_config(ModelSource(path=str(target)), 1).num_layers]
    make_eagle3(head, target, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    return SpeculativeConfig(str(head), "eagle3", *shape)


def as_text_part(folder: Path, architecture: str, prefix: str) -> Path:
    """Make a text model the text part of a model of images, with a tower. prefix: of its tensors' names."""
    inner = json.loads((folder / "config.json").read_text())
    outer = {name: inner.pop(name) for name in ("eos_token_id", "dtype")}
    config = {"architectures": [architecture], "text_config": inner} | outer
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(str(folder / "model.safetensors"))
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    if "lm_head.weight" in tensors and prefix.startswith("language_model"):
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    for tower in ("vision_tower.x.weight", "model.multi_modal_projector.y.weight"):
        tensors[tower] = torch.zeros(3)
    save_file(tensors, str(folder / "model.safetensors"))
    return folder
