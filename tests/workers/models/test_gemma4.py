"""Gemma 4 against transformers: heads of two sizes, keys that are values, shared KV, an embedding per layer, experts
beside the MLP; prompts longer than the windows; towers left out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.attention.kv_cache.layout import HeadsLayout
from aerie.attention.registry import BACKENDS
from aerie.kernels.attend.scores import ScoreRule
from aerie.kernels.capability import Capability
from aerie.kernels.kv.batches import Mode
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource
from aerie.workers.models.gemma.gemma4_config import Gemma4Config
from aerie.workers.models.loading import read_target_config
from aerie.workers.runner.backends import ModelShape
from tests.support.target_answers import as_text_part, check_chains_and_cached_prefixes, check_trees_on_ranks
from tests.support.tiny_models import make_target
from tests.workers.models.test_targets import by_transformers, by_us, check_greedy, requests_of

PUBLISHED = Path(__file__).parents[2] / "deploy" / "config" / "published"
EXPERTS: dict[str, Any] = {
    "architecture": "Gemma4",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
KINDS: dict[str, dict[str, Any]] = {  # as E2B and E4B; 12B and 31B; 26B-A4B
    "per-layer": {"architecture": "Gemma4"},
    "dense": {"architecture": "Gemma4Unified"},
    "experts": EXPERTS,
}


def made(folder: Path, name: str, seed: int = 0) -> Path:
    """Calm enough that layers, not the scaled and tied embedding alone, choose tokens."""
    return make_target(folder, seed, calm=8.0, **KINDS[name])


SLOW_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)]
slow_but = pytest.mark.parametrize(
    "name", ["per-layer", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k[0] != "p")]
)


@pytest.mark.parametrize("seed", [0, *SLOW_SEEDS])
@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str, seed: int) -> None:
    target = made(tmp_path / "target", name, seed)
    assert read_target_config(ModelSource(path=str(target)), 1).served_by is None
    found = by_us(target)
    assert found == by_transformers(target, found)
    assert sum(len(set(answer)) for answer in found) > 24  # of 64


@pytest.mark.slow  # trees and few pages: `tests.speculative.drafts.test_gemma4_assistant`
@slow_but
def test_trees_ranks_and_few_pages_change_no_token(tmp_path: Path, name: str) -> None:
    """The K/V head of global layers is one, which both ranks have."""
    check_trees_on_ranks(made(tmp_path / "target", name), tmp_path / "head")


@pytest.mark.slow
def test_whole_experts_on_each_rank_change_no_token(tmp_path: Path) -> None:
    target = made(tmp_path / "target", "experts")
    found = requests_of(target, tensor_parallel=2, expert_parallel=True)
    outputs = [request.output for request in found]
    assert outputs == by_transformers(target, outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_chains_and_cached_prefixes_change_no_token(tmp_path: Path, name: str) -> None:
    check_chains_and_cached_prefixes(made(tmp_path / "target", name), tmp_path / "head")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_copied_drafts_change_no_token(tmp_path: Path, name: str) -> None:
    target = made(tmp_path / "target", name)
    check_greedy(target, speculative=SpeculativeConfig(method="suffix"))


@pytest.mark.parametrize("name", ["dense", pytest.param("experts", marks=pytest.mark.slow)])
def test_the_text_part_of_a_model_of_images_is_served(tmp_path: Path, name: str) -> None:
    text = made(tmp_path / "text", name)
    expected = by_transformers(text)
    kind = "Gemma4Unified" if name == "dense" else "Gemma4"
    whole = as_text_part(text, f"{kind}ForConditionalGeneration", "model.language_model.")
    assert by_us(whole) == expected


def config_of(folder: Path, **changes: Any) -> Gemma4Config:
    folder.mkdir(parents=True, exist_ok=True)
    published = json.loads((PUBLISHED / "gemma-4-26B-A4B-it.json").read_text())
    published["text_config"] |= changes
    (folder / "config.json").write_text(json.dumps(published))
    config = read_target_config(ModelSource(path=str(folder)), 2)
    assert isinstance(config, Gemma4Config)
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation='relu' is not supported; it is one of silu, gelu_pytorch"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"layer_types": ["full_attention"]}, "layer_types: must be 30"),
        ({"num_kv_shared_layers": 28}, "num_kv_shared_layers=28: leaves no layer of each kind"),
        ({"top_k_experts": 200}, "num_experts_per_tok=200: must be 1 to the 128"),
        ({"num_global_key_value_heads": 3}, "num_attention_heads=16 is no multiple of num_key_value_heads=3"),
        ({"moe_intermediate_size": 703}, "tensor_parallel=2: does not divide"),
        ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 2.0}}}, "partial_rotary_factor=2: must be"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path / "t", **changes)


def test_heads_are_by_layer(tmp_path: Path) -> None:
    """Two ranks: 4 of 8 K/V heads of 256 where there is a window, one of 2 of 512 elsewhere."""
    config = config_of(tmp_path / "t")
    local, full = config.kv_groups(2, torch.bfloat16)
    assert isinstance(local.layout, HeadsLayout) and isinstance(full.layout, HeadsLayout)
    assert (local.layout.num_kv_heads, local.layout.head_dim, len(local.layers)) == (4, 256, 25)
    assert (full.layout.num_kv_heads, full.layout.head_dim, full.layers) == (1, 512, (5, 11, 17, 23, 29))
    assert config.score_rule(0) == ScoreRule(1.0, window=1024) and config.score_rule(5) == ScoreRule(1.0)


@pytest.mark.parametrize("backend", ["flashinfer", "trtllm"])
def test_backends_that_plan_for_one_size_of_heads_are_refused(tmp_path: Path, backend: str) -> None:
    shape = ModelShape(config_of(tmp_path / "t"), 2, torch.bfloat16, 16, Capability("cuda", (9, 0)))
    use = replace(shape.use(Mode.DECODE), scores=())
    assert BACKENDS["triton"].refusal(shape.use(Mode.DECODE)) is None
    assert "layers with different K/V heads" in str(BACKENDS[backend].refusal(use))


@pytest.mark.parametrize("kind", ["Gemma4", "Gemma4Unified"])
def test_a_config_that_says_little_is_read_as_transformers_reads_it(tmp_path: Path, kind: str) -> None:
    from transformers import CONFIG_MAPPING

    name = {"Gemma4": "gemma4_text", "Gemma4Unified": "gemma4_unified_text"}[kind]
    raw = {"architectures": [f"{kind}ForCausalLM"], "model_type": name, "num_hidden_layers": 7}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = read_target_config(ModelSource(path=str(tmp_path)), 1), CONFIG_MAPPING[name](num_hidden_layers=7)
    assert isinstance(ours, Gemma4Config)
    assert list(ours.kinds) == theirs.layer_types
    for layer, heads in enumerate(ours.heads):
        own = theirs.per_layer_config[layer]
        assert (heads.num_kv_heads, heads.head_dim) == (own.num_key_value_heads, own.head_dim)
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size, ours.max_position) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.max_position_embeddings,
    )
    assert ours.input_size == getattr(theirs, "hidden_size_per_layer_input", 0)
    assert ours.windows[0] == theirs.sliding_window and ours.windows[6] is None and ours.tie_embeddings
