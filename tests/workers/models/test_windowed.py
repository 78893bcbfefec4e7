"""Mistral, Ministral, Phi-3 and Qwen2's mixture of experts against transformers; and what they leave to the adapter."""

import json
from pathlib import Path
from typing import Any

import pytest

from aerie.workers.config import ModelSource
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.loading import read_target_config
from tests.support.slow import slow
from tests.support.target_answers import as_text_part, check_chains_and_cached_prefixes, check_trees_on_ranks
from tests.support.tiny_models import make_target
from tests.workers.models.test_targets import by_transformers, by_us, check_greedy

WINDOW = {"sliding_window": 12}  # prompts have up to 90 tokens
KINDS: dict[str, dict[str, Any]] = {
    "Mistral": {"architecture": "Mistral", **WINDOW},
    "Ministral": {"architecture": "Ministral", **WINDOW},
    "Phi-3": {"architecture": "Phi3", "partial_rotary_factor": 0.5, **WINDOW},
    "Qwen2-MoE": {"architecture": "Qwen2Moe", "decoder_sparse_step": 2},
}
SLOW_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)]


@pytest.mark.parametrize("seed", [0, *SLOW_SEEDS])
@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str, seed: int) -> None:
    target = make_target(tmp_path / "target", seed, **KINDS[name])
    assert read_target_config(ModelSource(path=str(target)), 1).served_by is None
    check_greedy(target)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_trees_ranks_and_few_pages_change_no_token(tmp_path: Path, name: str) -> None:
    check_trees_on_ranks(make_target(tmp_path / "target", **KINDS[name]), tmp_path / "head")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_chains_and_cached_prefixes_change_no_token(tmp_path: Path, name: str) -> None:
    check_chains_and_cached_prefixes(make_target(tmp_path / "target", **KINDS[name]), tmp_path / "head")


@pytest.mark.slow  # text parts by the same names: Gemma 4, Llama 4
def test_the_text_part_of_mistral_3_is_served(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", architecture="Mistral", **WINDOW)
    expected = by_transformers(target)
    whole = as_text_part(target, "Mistral3ForConditionalGeneration", "language_model.model.")
    assert read_target_config(ModelSource(path=str(whole)), 1).served_by is None
    assert by_us(whole) == expected


def config_of(folder: Path, name: str, **changes: Any) -> ModelConfig:
    target = make_target(folder, **KINDS[name])
    raw = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(raw))
    return read_target_config(ModelSource(path=str(target)), 1)


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "name,changes",
    [
        ("Phi-3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128, "sliding_window": None}),
        *slow(("Qwen2-MoE", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 4})),
    ],
)
def test_variants_are_left_to_the_adapter(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    config = config_of(tmp_path / "t", name, **changes)
    assert config.served_by is not None and "transformers" in config.served_by
    check_greedy(tmp_path / "t")
