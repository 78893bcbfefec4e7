"""Windows of Qwen2 and Qwen3, dense and with experts: the layers that transformers' configurations give one, for
published and for drawn configurations; who serves a model follows from them."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, PreTrainedConfig

from aerie.workers.models import llama
from aerie.workers.models.llama import layers_with_windows
from aerie.workers.models.registry import family_for, family_of
from tests.support import ROOT

KINDS = {  # model_type, by architecture
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
SLIDING = "sliding_attention"
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
PUBLISHED = {
    path.stem: config
    for path in sorted((ROOT / "tests" / "deploy" / "config" / "published").glob("*.json"))
    if (config := json.loads(path.read_text())).get("architectures", [""])[0] in KINDS
}


def by_transformers(kind: str, config: dict[str, Any]) -> set[int]:
    """Layers whose attention has a window in transformers."""
    theirs: PreTrainedConfig = CONFIG_MAPPING[kind](**{k: v for k, v in config.items() if k != "architectures"})
    if not theirs.sliding_window:
        return set()
    kinds = getattr(theirs, "layer_types", None) or [SLIDING] * theirs.num_hidden_layers
    return {i for i, each in enumerate(kinds) if each == SLIDING}


def full_config(architecture: str, layers: int, more: dict[str, Any]) -> dict[str, Any]:
    experts = EXPERTS if "Moe" in architecture else {}
    return {"architectures": [architecture], "num_hidden_layers": layers, **SIZES, **experts, **more}


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Every field for windows present, null or missing, around the defaults of 28 layers and 4096 tokens."""
    architecture, layers = draw(st.sampled_from(sorted(KINDS))), draw(st.sampled_from([1, 2, 5, 24, 28, 29, 36]))
    choices: dict[str, list[Any]] = {
        "use_sliding_window": [True, True, True, False],
        "max_window_layers": [0, 1, layers - 1, layers, layers + 1, 28],
        "sliding_window": [None, 16, 4096],
    }
    if architecture != "Qwen3MoeForCausalLM":
        kinds = draw(st.lists(st.sampled_from([SLIDING, "full_attention"]), min_size=layers, max_size=layers))
        choices["layer_types"] = [None, kinds]
    given = {name: draw(st.sampled_from(values)) for name, values in choices.items() if draw(st.booleans())}
    return full_config(architecture, layers, given)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(configs())
def test_the_layers_with_windows_are_those_of_transformers(config: dict[str, Any]) -> None:
    expected = by_transformers(KINDS[config["architectures"][0]], config)
    assert layers_with_windows(config) == expected
    own = family_of(config["architectures"][0], "m")
    assert (family_for(config, "m") is own) == (not expected)
    if not expected:
        own.read_config(config, "m")
    else:
        with pytest.raises(ValueError, match="sliding-window attention is not supported"):
            own.read_config(config, "m")


@pytest.mark.parametrize(
    "changes", [{}, {"use_sliding_window": True}, {"use_sliding_window": True, "sliding_window": 64}]
)
@pytest.mark.parametrize("name", PUBLISHED)
def test_windows_of_published_configurations(name: str, changes: dict[str, Any]) -> None:
    config = PUBLISHED[name] | changes
    assert layers_with_windows(config) == by_transformers(KINDS[config["architectures"][0]], config)


def test_24_layers_without_max_window_layers_are_all_full() -> None:
    """The default of max_window_layers is 28."""
    config = full_config("Qwen2ForCausalLM", 24, {"use_sliding_window": True})
    assert family_for(config, "m") is llama.FAMILY
    assert llama.read_config(config, "m").num_layers == 24


@pytest.mark.parametrize(
    ("architecture", "kind", "layers", "windows"),
    [
        ("Qwen2VLForConditionalGeneration", "qwen2_vl_text", 80, False),
        ("Qwen2VLForConditionalGeneration", "qwen2_vl_text", 81, True),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", 80, False),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", 81, True),
        ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", 90, False),
        ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", 90, False),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_text_parts_have_their_own_defaults(
    architecture: str, kind: str, layers: int, windows: bool, nested: bool
) -> None:
    """Qwen2-VL's default is 80 full layers; Qwen3-VL's have no windows."""
    text = full_config(architecture, layers, {"use_sliding_window": True, "head_dim": 16})
    theirs = CONFIG_MAPPING[kind](**{k: v for k, v in text.items() if k != "architectures"})
    has_window = getattr(theirs, "sliding_window", None) and SLIDING in (getattr(theirs, "layer_types", None) or ())
    assert bool(has_window) == windows
    config = {"architectures": [architecture], "text_config": text} if nested else text
    own = family_of(architecture, "m")
    assert (family_for(config, "m") is own) == (not windows)
    if not windows:
        assert own.read_config(config, "m").num_layers == layers


@pytest.mark.parametrize("value", ["28", -1, 2.5, True])
def test_a_wrong_value_is_named(value: Any) -> None:
    config = full_config("Qwen2ForCausalLM", 24, {"use_sliding_window": True, "max_window_layers": value})
    with pytest.raises(ValueError, match="max_window_layers"):
        family_for(config, "m").read_config(config, "m")
