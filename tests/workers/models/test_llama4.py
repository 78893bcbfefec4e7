"""Llama 4's text part: tokens of transformers, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.loading import read_target_config
from tests.support.known_models import make_known
from tests.support.slow import slow
from tests.support.target_answers import CHAIN, TREE, as_text_part, head_for
from tests.workers.models.test_targets import by_transformers, by_us, check_greedy

SCOUT: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": 200,
    "floor_scale": 300,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,  # as published: no frequencies between those that are divided and those that are not
        "original_max_position_embeddings": 64,
    },
}
MAVERICK = SCOUT | {
    "interleave_moe_layer_step": 2,
    "use_qk_norm": False,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}


def read(folder: Path, tensor_parallel: int = 1) -> ModelConfig:
    return read_target_config(ModelSource(path=str(folder), device="cpu"), tensor_parallel)


@pytest.mark.parametrize("kind", ["Scout", *slow("Maverick")])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """On one rank with a tree; on two with chains and with suffix drafts. Layers of full attention have no RoPE."""
    target = make_known(tmp_path / "t", "llama4_text", **(SCOUT if kind == "Scout" else MAVERICK))
    config, expected = read(target), by_transformers(target)
    assert config.served_by is None and len({tuple(answer) for answer in expected}) == len(expected)
    head = str(head_for(config, tmp_path))
    assert by_us(target) == expected
    assert by_us(target, speculative=SpeculativeConfig(head, "eagle3", *TREE)) == expected
    assert by_us(target, 2, SpeculativeConfig(head, "eagle3", *CHAIN)) == expected
    assert by_us(target, 2, SpeculativeConfig(method="suffix")) == expected


def test_a_router_multiplies_its_experts_input(tmp_path: Path) -> None:
    """With logits so small that all sigmoids are half, and so is every expert's input."""
    target = make_known(tmp_path / "t", "llama4_text", **SCOUT)
    path = str(target / "model.safetensors")
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("router.weight"):
            tensor.mul_(1e-3)
    save_file(tensors, path, metadata={"format": "pt"})
    check_greedy(target)


def test_the_text_part_of_a_model_of_images_is_served(tmp_path: Path) -> None:
    target = make_known(tmp_path / "t", "llama4_text", num_hidden_layers=2, **SCOUT)
    expected = by_transformers(target)
    as_text_part(target, "Llama4ForConditionalGeneration", "language_model.model.")
    path = str(target / "model.safetensors")
    save_file(load_file(path) | {"vision_model.x.weight": torch.zeros(3)}, path)
    assert by_us(target) == expected


@pytest.mark.parametrize(("chunk", "scale", "longest"), [(200, 300, 200), (300, 100, 99), (300, 8192, 256)])
def test_texts_end_where_attention_by_chunks_begins(tmp_path: Path, chunk: int, scale: int, longest: int) -> None:
    """Or its temperature, which rises from position floor_scale - 1 on."""
    target = make_known(
        tmp_path, "llama4_text", num_hidden_layers=2, **SCOUT | {"attention_chunk_size": chunk, "floor_scale": scale}
    )
    assert read(target).max_position == longest


def test_what_is_not_served_is_refused(tmp_path: Path) -> None:
    target = make_known(tmp_path, "llama4_text", num_hidden_layers=2, **SCOUT)
    path = target / "config.json"
    raw = json.loads(path.read_text())
    for field, value, words in (
        ("num_experts_per_tok", 2, "num_experts_per_tok=2 is not supported; a Llama 4 has 1"),
        ("no_rope_layers", [1], "no_rope_layers: must be 2"),
    ):
        path.write_text(json.dumps(raw | {field: value}))
        with pytest.raises(ValueError, match=words):
            read(target)
