"""Targets whose weights have 4 or 8 bits answer as what their weights mean, by transformers."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.kernels.capability import Capability
from aerie.kernels.cpp_library import compiles
from aerie.workers.models.weights import checkpoint_tensors
from tests.support.int_checkpoints import (
    Recipe,
    auto_round,
    awq,
    gptq,
    int_quantized,
    is_linear,
    pack_quantized,
    quantise,
)
from tests.support.tiny_models import make_target
from tests.workers.layers.test_moe import load
from tests.workers.models.test_targets import check_greedy

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
    "int-quantized": int_quantized(),
}
# Multiples of the groups of 32 that recipes have.
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 64, "v_head_dim": 24, "moe_intermediate_size": 64}
SIZES: dict[str, dict[str, Any]] = {
    "Qwen2": {"num_hidden_layers": 2},
    "Qwen3Moe": {"moe_intermediate_size": 64, "num_hidden_layers": 2},
    "DeepseekV3": LATENT | {"num_hidden_layers": 2},
    "Qwen3_5Moe": {"moe_intermediate_size": 64},
    "Qwen3Next": {"moe_intermediate_size": 64},
    "Qwen2Moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_hidden_layers": 2},
    "Glm4Moe": {"moe_intermediate_size": 64, "num_hidden_layers": 2},
    "Glm4MoeLite": LATENT | {"num_hidden_layers": 2},
}


# Of layouts that share their reader; test_int_formats.py has all crosses.
QUICK = ("int-quantized", "awq", "gptq_v2 asymmetric desc_act", "auto-round gptq", "pack-quantized g_idx, asymmetric")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RECIPES]
)
def test_greedy_tokens_are_those_of_the_dequantised_model(tmp_path: Path, name: str) -> None:
    source = make_target(tmp_path / "t", num_hidden_layers=2)
    folder = quantise(source, tmp_path / "q", RECIPES[name])
    check_greedy(folder, like=folder / "plain")


@pytest.mark.parametrize(
    "architecture,name",
    [
        pytest.param("Qwen2", "gptq desc_act", marks=pytest.mark.slow),
        pytest.param("Qwen3Moe", "gptq", marks=pytest.mark.slow),
        ("Qwen3Moe", "pack-quantized g_idx, asymmetric"),
        pytest.param("DeepseekV3", "awq", marks=pytest.mark.slow),
        pytest.param("DeepseekV3", "int-quantized", marks=pytest.mark.slow),
        pytest.param("DeepseekV3", "gptq desc_act", marks=pytest.mark.slow),
        ("Qwen3_5", "gptq asymmetric"),
        pytest.param("Qwen3_5", "pack-quantized channel, asymmetric", marks=pytest.mark.slow),
        pytest.param("Qwen3_5Moe", "awq", marks=pytest.mark.slow),
        pytest.param("Qwen3Next", "awq", marks=pytest.mark.slow),
        pytest.param("Glm4Moe", "awq", marks=pytest.mark.slow),
        pytest.param("Gemma3", "gptq", marks=pytest.mark.slow),
        pytest.param("Phi3", "awq", marks=pytest.mark.slow),
        pytest.param("Qwen2Moe", "pack-quantized", marks=pytest.mark.slow),
        pytest.param("Glm4MoeLite", "pack-quantized", marks=pytest.mark.slow),
        pytest.param("Qwen3Next", "pack-quantized", marks=pytest.mark.slow),
    ],
)
def test_every_family_is_read(tmp_path: Path, architecture: str, name: str) -> None:
    """Fused and merged projections, routed and shared experts, and what latent attention absorbs."""
    source = make_target(tmp_path / "t", architecture=architecture, **SIZES.get(architecture, {}))
    folder = quantise(source, tmp_path / "q", RECIPES[name])
    check_greedy(folder, like=folder / "plain")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_matrices_that_are_multiplied_together_may_differ(tmp_path: Path, ranks: int) -> None:
    """q, k and v have 4, 8 and 16 bits, with biases; gate and up projections differ in their groups."""
    source = make_target(tmp_path / "t", architecture="Qwen2", num_hidden_layers=2)
    four, eight, wide = gptq(), gptq(bits=8), gptq(group=64)
    rules = {"-:.*v_proj": {}, r"+:.*\.k_proj": {"bits": 8}, ".*up_proj": {"group_size": 64}}

    def chosen(name: str) -> Recipe | None:
        if not is_linear(name) or "v_proj" in name:
            return None
        return eight if "k_proj" in name else wide if "up_proj" in name else four

    folder = quantise(source, tmp_path / "q", four, chosen, four.config | {"dynamic": rules})
    check_greedy(folder, ranks, like=folder / "plain")


def test_experts_that_differ_among_themselves_are_refused(tmp_path: Path) -> None:
    source = make_target(tmp_path / "t", architecture="Qwen3Moe", num_hidden_layers=1)
    folder = quantise(source, tmp_path / "q", awq(), config=awq().config | {"modules_to_not_convert": ["down_proj"]})
    with pytest.raises(ValueError, match="matrices of an expert are quantised differently .*down_proj unquantised"):
        load(folder)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    folder = quantise(make_target(tmp_path / "t", num_hidden_layers=1), tmp_path / "q", pack_quantized())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": awq().config}))
    with pytest.raises(ValueError, match=r"missing: \S+q_proj.qweight.* unexpected: \S+weight_packed"):
        load(folder)


def test_a_start_says_what_is_served_how(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = make_target(tmp_path / "t", architecture="DeepseekV3", **SIZES["DeepseekV3"])
    caplog.set_level(logging.INFO)
    folder = quantise(source, tmp_path / "q", awq())
    load(folder)
    assert (
        f"model {folder}: layers by format: int4 in groups of 32 (11), int4 in groups of 32, dequantised (2), "
        "unquantised (1)" in caplog.text
    )
    here = Capability.of(torch.device("cpu"))
    assert ("weights of few bits are multiplied in the model's type" in caplog.text) != compiles(here)


def test_a_start_says_that_activations_are_not_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(quantise(make_target(tmp_path / "t", num_hidden_layers=1), tmp_path / "q", int_quantized()))
    (line,) = (record.message for record in caplog.records if "activations stay" in record.message)
    assert line.endswith("(int8 weights are multiplied as W8A16 here), which is more exact")


def test_dummies_are_finite(tmp_path: Path) -> None:
    source = make_target(tmp_path / "t", architecture="Qwen3Moe", num_hidden_layers=1, moe_intermediate_size=64)
    for name in ("gptq desc_act", "awq"):
        folder = quantise(source, tmp_path / name, RECIPES[name])
        (folder / "model.safetensors").unlink()
        layer = load(folder, load_format="dummy").layers[0]
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
        assert 0.02 < layer.mlp.partial(x).std() < 2


def test_headers_are_checked_without_values(tmp_path: Path) -> None:
    """A load on the meta device reads lists of integers alone: `aerie plan` need not read gigabytes of codes."""
    folder = quantise(make_target(tmp_path / "t", num_hidden_layers=1), tmp_path / "q", gptq(desc_act=True))
    found = {each.name: each.tensor for each in checkpoint_tensors(folder, torch.device("meta"))}
    name = "model.layers.0.mlp.down_proj"
    assert found[f"{name}.qweight"].is_meta and found[f"{name}.qzeros"].is_meta
    assert not found[f"{name}.g_idx"].is_meta


@pytest.mark.parametrize("where", ["compression_config", "quantize_config.json"])
def test_what_older_exporters_write_is_read(tmp_path: Path, where: str) -> None:
    """Their settings in other places, and biases of zeros that AutoGPTQ gives every layer."""
    source = make_target(tmp_path / "t", num_hidden_layers=1)
    folder = quantise(source, tmp_path / "q", pack_quantized() if where == "compression_config" else gptq())
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    if where == "compression_config":
        config[where] = quantization
    else:
        (folder / where).write_text(json.dumps(quantization | {"quant_method": "gptq"}))
        tensors = load_file(str(folder / "model.safetensors"))
        tensors |= {f"{name.removesuffix('.qweight')}.bias": torch.zeros(8) for name in tensors if "qweight" in name}
        save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    ours, plain = (load(path).layers[0].mlp.down_proj.method.dense_weight() for path in (folder, folder / "plain"))
    assert torch.equal(ours, plain)
    if where == "quantize_config.json":
        tensors |= {"model.layers.0.mlp.down_proj.bias": torch.ones(8)}
        save_file(tensors, str(folder / "model.safetensors"))
        with pytest.raises(ValueError, match=r"unexpected: model.layers.0.mlp.down_proj.bias"):
            load(folder)
