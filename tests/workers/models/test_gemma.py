"""Gemma 2 and 3 against transformers: prompts longer than the windows, soft caps, RoPE by layer, towers left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from aerie.workers.config import ModelSource
from aerie.workers.models.gemma.gemma3 import GemmaConfig
from aerie.workers.models.loading import read_target_config
from tests.support.target_answers import as_text_part, check_chains_and_cached_prefixes, check_trees_on_ranks
from tests.support.tiny_models import make_target
from tests.workers.models.test_targets import by_transformers, by_us, check_greedy

KINDS = ["Gemma2", "Gemma3"]  # of windows of 12 tokens; prompts have up to 90


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", KINDS)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, architecture: str, seed: int) -> None:
    target = make_target(tmp_path / "target", seed, architecture=architecture)
    check_greedy(target)


@pytest.mark.slow
def test_layers_whose_window_hides_nothing_keep_their_rope(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", architecture="Gemma3", sliding_window=512)
    config = read_target_config(ModelSource(path=str(target)), 1)
    assert isinstance(config, GemmaConfig) and not any(config.windows) and any(config.is_local)
    check_greedy(target)


@pytest.mark.parametrize("architecture", [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_trees_ranks_and_few_pages_change_no_token(tmp_path: Path, architecture: str) -> None:
    check_trees_on_ranks(make_target(tmp_path / "target", architecture=architecture), tmp_path / "head")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", KINDS)
def test_chains_and_cached_prefixes_change_no_token(tmp_path: Path, architecture: str) -> None:
    check_chains_and_cached_prefixes(make_target(tmp_path / "target", architecture=architecture), tmp_path / "head")


@pytest.mark.parametrize(
    "prefix", ["language_model.model.", pytest.param("model.language_model.", marks=pytest.mark.slow)]
)
def test_the_text_part_of_a_model_of_images_is_served(tmp_path: Path, prefix: str) -> None:
    """As published, and as transformers saves it since its release 4.52."""
    text = make_target(tmp_path / "text", architecture="Gemma3")
    expected = by_transformers(text)
    assert by_us(as_text_part(text, "Gemma3ForConditionalGeneration", prefix)) == expected


def config_of(folder: Path, architecture: str, **changes: Any) -> GemmaConfig:
    target = make_target(folder, architecture=architecture)
    raw = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(raw))
    config = read_target_config(ModelSource(path=str(target)), 1)
    assert isinstance(config, GemmaConfig)
    return config


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"hidden_activation": "relu"}, "hidden_activation='relu' is not supported; it is one of silu, gelu_pytorch"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
        ({"layer_types": ["full_attention"]}, "layer_types: must be 5"),
        ({"attn_logit_softcapping": 3.0}, "attn_logit_softcapping=3: Gemma 3 has no cap on scores"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0: must be a number above 0"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path / "t", "Gemma3", **changes)


@pytest.mark.parametrize("architecture,period", [("Gemma2", 2), ("Gemma3", 6)])
def test_a_config_that_says_little_is_read_as_transformers_reads_it(
    tmp_path: Path, architecture: str, period: int
) -> None:
    from transformers import AutoConfig

    target = make_target(tmp_path / "t", architecture=architecture)
    said = ("architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "dtype")
    raw = {key: value for key, value in json.loads((target / "config.json").read_text()).items() if key in said}
    (target / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 7}))
    config, theirs = read_target_config(ModelSource(path=str(target)), 1), AutoConfig.from_pretrained(target)
    assert isinstance(config, GemmaConfig)
    assert list(config.windows) == [None if (i + 1) % period == 0 else 4096 for i in range(7)]
    assert [window is None for window in config.windows] == [kind[0] == "f" for kind in theirs.layer_types]
    ours = (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size, config.max_position)
    assert ours == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.head_dim,
        theirs.vocab_size,
        theirs.max_position_embeddings,
    )
    assert config.soft_cap == theirs.attn_logit_softcapping and config.logit_cap == theirs.final_logit_softcapping
    assert config.query_scale == theirs.query_pre_attn_scalar**-0.5 and config.tie_embeddings
    ropes = theirs.rope_parameters
    full, local = (ropes.get(kind, ropes)["rope_theta"] for kind in ("full_attention", "sliding_attention"))
    assert (config.rope.theta, config.local_rope.theta) == (full, local)
