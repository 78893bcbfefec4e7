"""Targets whose weights have 4 or 8 bits answer as what their weights mean, by transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.int_checkpoints import Recipe, auto_round, awq, gptq, pack_quantized, quantise
from tests.support.tiny_models import make_target
from tests.workers.models.test_targets import by_transformers, by_us

RECIPES: dict[str, Recipe] = {
    "awq": awq(),
    "gptq": gptq(),
    "gptq 8 bits": gptq(bits=8, group=None),
    "gptq desc_act": gptq(desc_act=True),
    "gptq asymmetric": gptq(symmetric=False),
    "gptq_v2 asymmetric desc_act": gptq(symmetric=False, v2=True, desc_act=True),
    "auto-round gptq": auto_round(),
    "auto-round awq": auto_round("auto_awq", symmetric=False),
    "pack-quantized": pack_quantized(),
    "pack-quantized channel, asymmetric": pack_quantized(group=None, symmetric=False),
    "pack-quantized g_idx, asymmetric": pack_quantized(symmetric=False, ordered=True),
    "pack-quantized 8 bits": pack_quantized(bits=8, group=None, scale_dtype=torch.float32),
}
# Multiples of the groups of 32 that recipes have.
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 64, "v_head_dim": 24, "moe_intermediate_size": 64}
SIZES: dict[str, dict[str, Any]] = {
    "Qwen2": {"num_hidden_layers": 2},
    "Qwen3Moe": {"moe_intermediate_size": 64, "num_hidden_layers": 2},
    "DeepseekV3": LATENT | {"num_hidden_layers": 2},
    "Qwen3_5Moe": {"moe_intermediate_size": 64},
    "Qwen3Next": {"moe_intermediate_size": 64},
}


# Of layouts that share their reader; test_int_formats.py has all crosses.
QUICK = ("awq", "gptq_v2 asymmetric desc_act", "auto-round gptq", "pack-quantized g_idx, asymmetric")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RECIPES]
)
def test_greedy_tokens_are_those_of_the_dequantised_model(tmp_path: Path, name: str) -> None:
    source = make_target(tmp_path / "t", num_hidden_layers=2)
    folder = quantise(source, tmp_path / "q", RECIPES[name])
    assert by_us(folder) == by_transformers(folder / "plain")


@pytest.mark.parametrize(
    "architecture,name",
    [
        pytest.param("Qwen2", "gptq desc_act", marks=pytest.mark.slow),
        pytest.param("Qwen3Moe", "gptq", marks=pytest.mark.slow),
        ("Qwen3Moe", "pack-quantized g_idx, asymmetric"),
        ("DeepseekV3", "awq"),
        pytest.param("DeepseekV3", "gptq desc_act", marks=pytest.mark.slow),
        ("Qwen3_5", "gptq asymmetric"),
        pytest.param("Qwen3_5", "pack-quantized channel, asymmetric", marks=pytest.mark.slow),
        pytest.param("Qwen3_5Moe", "awq", marks=pytest.mark.slow),
        ("Qwen3Next", "awq"),
        pytest.param("Qwen3Next", "pack-quantized", marks=pytest.mark.slow),
    ],
)
def test_every_family_is_read(tmp_path: Path, architecture: str, name: str) -> None:
    """Fused and merged projections, routed and shared experts, and what latent attention absorbs."""
    source = make_target(tmp_path / "t", architecture=architecture, **SIZES.get(architecture, {}))
    folder = quantise(source, tmp_path / "q", RECIPES[name])
    assert by_us(folder) == by_transformers(folder / "plain")
