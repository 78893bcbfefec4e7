"""OLMo 2 and 3 and Granite against transformers: norms after attention and MLP, norms over all heads of all ranks,
windows with RoPE of their own, multipliers, experts beside a shared MLP; and what they leave to the adapter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.kernels.norm.norm import rms_norm
from aerie.kernels.span import Span
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.linear import kv_head_span
from aerie.workers.layers.norm import ProjectionNorm, norm_projections, sum_in_halves
from aerie.workers.layers.weighted import WeightKey
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.granite import GraniteConfig
from aerie.workers.models.loading import read_target_config
from aerie.workers.models.mistral import LocalRopeConfig
from tests.support.slow import slow
from tests.support.target_answers import check_chains_and_cached_prefixes, check_trees_on_ranks
from tests.support.thread_group import on_ranks
from tests.support.tiny_models import make_target
from tests.workers.models.test_targets import by_us, check_greedy

KINDS: dict[str, dict[str, Any]] = {  # windows of 12 tokens; prompts have up to 90
    "OLMo 2": {"architecture": "Olmo2", "attention_bias": True},
    "OLMo 3": {"architecture": "Olmo3"},
    "Granite": {"architecture": "Granite", "tie_word_embeddings": True, "attention_bias": True},
    "Granite MoE": {"architecture": "GraniteMoe"},
    "Granite MoE, shared": {"architecture": "GraniteMoeShared"},
    "Granite 4": {"architecture": "GraniteMoeHybrid"},
    "Granite 4, experts": {
        "architecture": "GraniteMoeHybrid",
        "the number of experts": 6,
        "num_experts_per_tok": 2,
        "position_embedding_type": None,
    },
}


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
@pytest.mark.parametrize("name", ["Granite MoE, shared", *slow(*(name for name in KINDS if "shared" not in name))])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str, seed: int) -> None:
    target = make_target(tmp_path / "target", seed, **KINDS[name])
    assert read_target_config(ModelSource(path=str(target)), 1).served_by is None
    check_greedy(target)


@pytest.mark.parametrize("name", slow(*KINDS))  # norms of shared heads: below
def test_trees_ranks_and_few_pages_change_no_token(tmp_path: Path, name: str) -> None:
    check_trees_on_ranks(make_target(tmp_path / "target", **KINDS[name]), tmp_path / "head")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_chains_copied_drafts_and_cached_prefixes_change_no_token(tmp_path: Path, name: str) -> None:
    target = make_target(tmp_path / "target", **KINDS[name])
    check_chains_and_cached_prefixes(target, tmp_path / "head")
    assert by_us(target, speculative=SpeculativeConfig(method="suffix", num_steps=7, num_draft_tokens=8)) == by_us(
        target
    )


@pytest.mark.slow
def test_ranks_that_hold_the_same_head_norm_it_once(tmp_path: Path) -> None:
    """Four ranks, two K/V heads."""
    target = make_target(tmp_path / "target", **KINDS["OLMo 2"])
    check_greedy(target, tensor_parallel=4)


@pytest.mark.parametrize("ranks,num_kv_heads", [(1, 2), (2, 4), (4, 2), (4, 1)])
def test_a_norm_over_the_heads_of_all_ranks_is_that_of_one(ranks: int, num_kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    q, k = torch.randn(5, 8, 6, generator=generator), torch.randn(5, num_kv_heads, 6, generator=generator)
    weights = [torch.rand(x[0].numel(), generator=generator) for x in (q, k)]
    whole = [rms_norm(x.flatten(1), weight, 1e-5).view(x.shape) for x, weight in zip((q, k), weights, strict=True)]

    def normed(group: TPGroup) -> list[torch.Tensor]:
        spans = (
            Span(8 // ranks * group.rank, 8 // ranks * (group.rank + 1), 8),
            Span(*kv_head_span(num_kv_heads, group), num_kv_heads),
        )
        norms = [ProjectionNorm(span, 6, 1e-5) for span in spans]
        for norm, weight in zip(norms, weights, strict=True):
            norm.load(WeightKey("weight"), weight)
        parts = [x[:, span.first : span.end] for x, span in zip((q, k), spans, strict=True)]
        found = norm_projections(norms, parts, group)
        for x, span, out in zip(whole, spans, found, strict=True):
            torch.testing.assert_close(out, x[:, span.first : span.end])  # float32, another order of the sum
        return found

    assert len(on_ranks(ranks, normed)) == ranks


@pytest.mark.parametrize("n", [1, 2, 3, 48, 77, 128])
def test_a_sum_in_halves_adds_in_an_order_of_its_own(n: int) -> None:
    """Every row as alone; the order matters, as these terms show."""
    terms = torch.tensor([2.0**24, 1.0, -(2.0**24), 3.0, 1.0])
    x = terms[(torch.arange(7)[:, None] + torch.arange(n)) % 5]
    found = sum_in_halves(x, 1)
    assert all(torch.equal(sum_in_halves(x[row : row + 1], 1), found[row : row + 1]) for row in range(7))
    assert bool((found.double() - x.double().sum(1)).abs().le(n).all())


def config_of(folder: Path, name: str, **changes: Any) -> ModelConfig:
    target = make_target(folder, **KINDS[name], num_hidden_layers=4)
    raw = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value != ...}))
    return read_target_config(ModelSource(path=str(target)), 1)


def test_published_fields_of_olmo_3_scale_the_angles_of_full_layers_alone(tmp_path: Path) -> None:
    """As older exporters write them; every fourth layer attends to all."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.2}
    changes = {"rope_parameters": ..., "layer_types": ..., "rope_scaling": yarn, "rope_theta": 500000}
    config = config_of(tmp_path / "t", "OLMo 3", **changes)
    assert isinstance(config, LocalRopeConfig) and config.windows == (12, 12, 12, None)
    assert [(rope.kind, rope.theta) for rope in config.layer_ropes] == [("default", 500000.0)] * 3 + [
        ("yarn", 500000.0)
    ]


@pytest.mark.parametrize(
    "name,changes",
    [
        ("Granite", {"mlp_bias": True}),
        ("Granite", {"hidden_act": "gelu"}),
        ("OLMo 2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    ],
)
def test_variants_are_left_to_the_adapter(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    assert config_of(tmp_path / "t", name, **changes).served_by is not None


def test_recurrent_layers_are_refused(tmp_path: Path) -> None:
    """As published: transformers' own files have an infinite time_step_limit."""
    kinds = ["mamba", "attention", "mamba", "mamba"]
    with pytest.raises(ValueError, match="keeps a state that only its own family could serve"):
        config_of(tmp_path / "t", "Granite 4", layer_types=kinds, time_step_limit=...)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7: must be 1 to the 6 experts"),
        ({"logits_scaling": 0}, "logits_scaling=0: must be a number above 0"),
        ({"shared_intermediate_size": -1}, "shared_intermediate_size=-1: must be a whole number"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path / "t", "Granite MoE, shared", **changes)


def test_ranks_may_hold_whole_experts(tmp_path: Path) -> None:
    config = config_of(tmp_path / "t", "Granite MoE, shared")
    assert isinstance(config, GraniteConfig)
    whole = config.with_whole_experts("model x")
    whole.check_shards(2, "model x")
    assert whole.cut_sizes == {"shared_intermediate_size": 48, "the number of experts": 6}
    with pytest.raises(ValueError, match="has no experts"):
        config_of(tmp_path / "d", "Granite", tie_word_embeddings=True).with_whole_experts("model x")
