"""Fused modules of towers against transformers' own. `test_vision_spans` compares whole towers."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLMLP,
    Qwen2_5_VLRMSNorm,
    Qwen2_5_VLVisionAttention,
    Qwen2_5_VLVisionBlock,
)

from aerie.kernels.norm.norm import silu_mul
from aerie.workers.config import ModelSource
from aerie.workers.vision import tower
from aerie.workers.vision.config import vision_of
from aerie.workers.vision.encoders import build_encoder
from aerie.workers.vision.fused import Block, GatedMLP, RMSNorm, SpanAttention
from tests.support.targets.image_models import make_image_model


@pytest.mark.parametrize(("width", "padded"), [(24, 24), (60, 64), (3420, 3456)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_padded_mlp_has_the_same_results(width: int, padded: int, bias: bool) -> None:
    torch.manual_seed(width)
    module = Qwen2_5_VLMLP(Qwen2_5_VLVisionConfig(hidden_size=16, intermediate_size=width), bias=bias)
    fused = GatedMLP(module, silu_mul)
    assert fused.gate_up.weight.shape == (2 * padded, 16) and fused.down_proj.weight.shape == (16, padded)
    x = torch.randn(5, 16)
    with torch.inference_mode():
        torch.testing.assert_close(fused(x), module(x), rtol=1e-5, atol=1e-6)


def tower_of(folder: Path, kind: str) -> Any:
    """An encoder with random weights, and other weights of norms."""
    make_image_model(folder, kind)
    config = vision_of(ModelSource(path=str(folder)))
    assert config is not None
    torch.manual_seed(2)
    encoder = build_encoder(config).eval()
    for name, parameter in encoder.named_parameters():
        if "norm" in name or "ln_q" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return encoder


def counts(encoder: nn.Module) -> list[int]:
    modules = list(encoder.modules())
    return [sum(isinstance(module, each) for module in modules) for each in (RMSNorm, Block, SpanAttention, GatedMLP)]


@pytest.mark.parametrize(
    ("kind", "num_norms"), [("qwen2_5_vl", 5), ("qwen2_vl", 0), ("qwen3_vl", 0), ("qwen3_5", 0), ("qwen3_5_moe", 0)]
)
def test_all_layers_are_fused(tmp_path: Path, kind: str, num_norms: int) -> None:
    """num_norms: two in each of two blocks, and the merger's."""
    encoder = tower_of(tmp_path, kind)
    assert encoder.fuse() == []
    assert counts(encoder) == [num_norms, 2 if num_norms else 0, 2, 2 if num_norms else 0]


def renamed(encoder: nn.Module, ending: str, new: type | None = None) -> None:
    """Give modules whose class has this ending another class: by default one of the same behaviour."""
    for module in encoder.modules():
        if type(module).__name__.endswith(ending):
            new = new or type("Other", (type(module),), {})
            module.__class__ = new


@pytest.mark.parametrize("ending", ["RMSNorm", "VisionAttention", "VLMLP", "VisionBlock"])
def test_classes_of_other_names_are_fused(tmp_path: Path, ending: str) -> None:
    encoder = tower_of(tmp_path, "qwen2_5_vl")
    renamed(encoder, ending)
    assert encoder.fuse() == []
    assert counts(encoder) == [5, 2, 2, 2]


class Shifted(Qwen2_5_VLRMSNorm):
    """As in Gemma: the weight's distance from 1."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + hidden_states


class OtherFields(nn.Module):
    eps = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.weight * torch.nn.functional.normalize(hidden_states, dim=-1)
        return out


class Softer(Qwen2_5_VLVisionAttention):
    def forward(self, hidden_states: Tensor, **layout: Any) -> Tensor:
        return super().forward(hidden_states, **layout) * 0.5


class Sandwich(Qwen2_5_VLVisionBlock):
    def forward(self, hidden_states: Tensor, **layout: Any) -> Tensor:
        return self.norm1(super().forward(hidden_states, **layout))


@pytest.mark.parametrize(
    ("ending", "new", "expected"),
    [
        ("RMSNorm", Shifted, [0, 0, 2, 2]),
        ("RMSNorm", OtherFields, [0, 0, 2, 2]),
        ("VisionAttention", Softer, [5, 2, 0, 2]),
        ("VisionBlock", Sandwich, [5, 0, 2, 2]),
    ],
)
def test_modules_with_other_results_stay_and_are_named(
    tmp_path: Path, ending: str, new: type, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    encoder = tower_of(tmp_path, "qwen2_5_vl")
    renamed(encoder, ending, new)
    pixels, grid = torch.randn(24, 3, 16), (1, 4, 6)
    with torch.inference_mode():
        wanted = encoder(pixels, grid)
        left = encoder.fuse()
        torch.testing.assert_close(encoder(pixels, grid), wanted, rtol=1e-4, atol=1e-4)
    assert new.__name__ in left and counts(encoder) == expected


def test_a_start_names_modules_that_are_not_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_image_model(tmp_path, "qwen2_5_vl")
    source = ModelSource(path=str(tmp_path))
    config = vision_of(source)
    assert config is not None
    monkeypatch.setattr(Qwen2_5_VLRMSNorm, "forward", Shifted.forward)
    with caplog.at_level(logging.WARNING):
        tower._loaded(config, source, torch.float32, torch.device("cpu"))
    assert "vision tower: Qwen2_5_VLRMSNorm of transformers are not fused" in caplog.text
