"""Fused modules of towers against transformers' own. `test_vision_spans` compares whole towers."""

from pathlib import Path

import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP

from aerie.kernels.norm.norm import silu_mul
from aerie.workers.config import ModelSource
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


@pytest.mark.parametrize(("kind", "num_norms"), [("qwen2_5_vl", 5), ("qwen3_vl", 0)])
def test_all_layers_are_fused(tmp_path: Path, kind: str, num_norms: int) -> None:
    """A version of transformers with other names would leave modules as they are. num_norms: two in each of two blocks,
    and the merger's."""
    make_image_model(tmp_path, kind)
    config = vision_of(ModelSource(path=str(tmp_path)))
    assert config is not None
    encoder = build_encoder(config)
    encoder.fuse()
    modules = list(encoder.modules())
    counts = [sum(isinstance(module, each) for module in modules) for each in (RMSNorm, Block, SpanAttention, GatedMLP)]
    assert counts == [num_norms, 2 if num_norms else 0, 2, 2 if num_norms else 0]
