"""What a checkpoint says of KV in FP8: the scheme in its configuration, and the scales among its tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.attention.config import CacheConfig
from aerie.kernels.kv.stored_values import FP8, KVScales
from aerie.workers.config import ModelSource, WorkerConfig
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.layers.attention import kv_scales, warn_of_missing
from aerie.workers.models.loading import load_target, read_target_config
from aerie.workers.runner.layout import EnginePlan, plan_engine
from tests.support.tiny_models import LAYERS, make_target

CPU = torch.device("cpu")
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def with_scales(target: Path, folder: Path, scales: dict[str, torch.Tensor], **config: Any) -> Path:
    """A copy of the checkpoint with these tensors in each layer's attention and these keys in its config.json."""
    folder.mkdir()
    tensors = load_file(target / "model.safetensors")
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.self_attn.{name}": scale * (layer + 1) for name, scale in scales.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((target / "config.json").read_text()) | config))
    return folder


def loaded(folder: Path) -> torch.nn.Module:
    source = ModelSource(str(folder), device="cpu")
    return load_target(source, read_target_config(source, 1), SOLO, CPU, 64)


def planned(folder: Path, dtype: str = "auto") -> EnginePlan:
    source = ModelSource(str(folder), device="cpu")
    return plan_engine(WorkerConfig(source, CacheConfig(dtype=dtype)), read_target_config(source, 1))


@pytest.mark.parametrize(
    "k_name,v_name",
    [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("attn.k_scale", "attn.v_scale")],
)
def test_scales_are_found_where_exporters_put_them(target: Path, tmp_path: Path, k_name: str, v_name: str) -> None:
    scales = {k_name: torch.tensor([0.5]), v_name: torch.tensor(2.0), "q_scale": torch.tensor(7.0)}
    model = loaded(with_scales(target, tmp_path / "scaled", scales))
    assert kv_scales(model) == {i: KVScales(0.5 * (i + 1), 2.0 * (i + 1)) for i in range(LAYERS)}


def test_a_checkpoint_without_scales_has_ones_and_a_warning(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = loaded(target)
    assert kv_scales(model) == dict.fromkeys(range(LAYERS), KVScales())
    warn_of_missing(model, "model x")
    assert f"model x: KV is kept in FP8, and the checkpoint has no k_scale and v_scale of {LAYERS}" in caplog.text


def test_scaled_layers_cause_no_warning(target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_missing(loaded(with_scales(target, tmp_path / "scaled", {"k_scale": torch.ones(1)})), "model x")
    assert not caplog.text


@pytest.mark.parametrize(
    "scale,reason",
    [
        (torch.ones(2), r"layers.0.self_attn.k_scale .* has shape \(2,\): KV in FP8 has one scale per layer"),
        (torch.zeros(1), r"k_scale .* is 0.0: a scale is a finite number above 0"),
        (torch.full((1,), float("nan")), r"k_scale .* is nan"),
    ],
)
def test_scales_that_cannot_be_are_refused(target: Path, tmp_path: Path, scale: torch.Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        loaded(with_scales(target, tmp_path / "scaled", {"k_scale": scale}))


@pytest.mark.parametrize(
    "config,expected",
    [
        ({}, torch.float32),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}, FP8),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, FP8),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, FP8),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, torch.float32),
    ],
)
def test_auto_is_what_the_checkpoint_says(
    target: Path, tmp_path: Path, config: dict[str, Any], expected: torch.dtype
) -> None:
    folder = with_scales(target, tmp_path / "scaled", {}, quantization_config=weights_of(config))
    assert planned(folder).kv_dtype == expected
    assert planned(folder, "model").kv_dtype == torch.float32
    assert planned(folder, "fp8_e4m3").kv_dtype == FP8
    assert planned(folder, "fp8_e4m3").layout.kv_in_fp8


def weights_of(config: dict[str, Any]) -> dict[str, Any]:
    """A quantization_config that is read, with more keys."""
    if config.get("quant_method") == "compressed-tensors":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
        return {"config_groups": groups, "ignore": []} | config
    return {"quant_algo": "NVFP4"} | config if config else config


def test_modelopt_s_own_file_counts(target: Path, tmp_path: Path) -> None:
    folder = with_scales(target, tmp_path / "scaled", {})
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    assert planned(folder).kv_dtype == FP8


@pytest.mark.parametrize(
    "config,reason",
    [
        ({"kv_cache_scheme": SCHEME | {"num_bits": 4}}, "kv_cache_scheme with {'num_bits': 4}"),
        ({"kv_cache_scheme": SCHEME | {"dynamic": True}}, "kv_cache_scheme with {'dynamic': True}"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo='NVFP4'"),
    ],
)
def test_another_scheme_is_refused_unless_the_configuration_decides(
    target: Path, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    config = weights_of({"quant_method": "compressed-tensors"} | config)
    folder = with_scales(target, tmp_path / "scaled", {}, quantization_config=config)
    with pytest.raises(ValueError, match=f"cache.dtype=auto: the checkpoint's {reason} is not supported; set cache.d"):
        planned(folder)
    assert planned(folder, "model").kv_dtype == torch.float32


def test_names_of_dtypes_are_checked() -> None:
    with pytest.raises(ValueError, match="dtype=int4: is not a dtype of KV; choose one of auto, model, fp8_e4m3"):
        CacheConfig(dtype="int4")
    with pytest.raises(ValueError, match="draft_dtype=fp8_e5m2: is not a dtype of KV"):
        CacheConfig(draft_dtype="fp8_e5m2")
