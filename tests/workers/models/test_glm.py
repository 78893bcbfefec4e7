"""GLM's mixtures of experts against transformers: GLM-4.5 and GLM-4.7-Flash."""

import json
from pathlib import Path
from typing import Any

import pytest

from aerie.workers.config import ModelSource
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.loading import read_target_config
from tests.support.slow import slow
from tests.support.target_answers import check_chains_and_cached_prefixes, check_trees_on_ranks
from tests.support.tiny_models import make_target
from tests.workers.models.test_targets import check_greedy

AIR = {"use_qk_norm": False, "n_shared_experts": 2, "first_k_dense_replace": 0}  # as GLM-4.5-Air has no norms per head
KINDS: list[dict[str, Any]] = [
    {"architecture": "Glm4Moe"},
    {"architecture": "Glm4Moe", "attention_bias": False, **AIR},
    {"architecture": "Glm4MoeLite"},
]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", [KINDS[0], *slow(KINDS[1]), KINDS[2]], ids=["4.5", "4.5-Air", "4.7-Flash"])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any], seed: int) -> None:
    target = make_target(tmp_path / "target", seed, **settings)
    check_greedy(target)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Glm4Moe", "Glm4MoeLite"])
def test_trees_ranks_and_few_pages_change_no_token(tmp_path: Path, architecture: str) -> None:
    check_trees_on_ranks(make_target(tmp_path / "target", architecture=architecture), tmp_path / "head")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Glm4Moe", "Glm4MoeLite"])
def test_chains_and_cached_prefixes_change_no_token(tmp_path: Path, architecture: str) -> None:
    check_chains_and_cached_prefixes(make_target(tmp_path / "target", architecture=architecture), tmp_path / "head")


def config_of(folder: Path, architecture: str, **changes: Any) -> ModelConfig:
    target = make_target(folder, architecture=architecture)
    raw = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(raw))
    return read_target_config(ModelSource(path=str(target)), raw.get("tp", 1))


@pytest.mark.parametrize(
    "architecture,changes,message",
    [
        (
            "Glm4Moe",
            {"partial_rotary_factor": 0.45, "rope_parameters": None},
            "partial_rotary_factor=0.45 of head_dim=16",
        ),
        ("Glm4Moe", {"topk_method": "softer"}, "topk_method='softer' is not supported"),
        ("Glm4Moe", {"tp": 3}, r"tensor_parallel=3: does not divide .*num_attention_heads=4, .*try one of \[1, 2, 4\]"),
        ("Glm4MoeLite", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "'dense' and then 'sparse'"),
        ("Glm4MoeLite", {"rope_interleave": False}, "rope_interleave=False is not supported"),
    ],
)
def test_what_would_be_ignored_is_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path / "t", architecture, **changes)
