"""Towers that attend to all windows in one launch: the same embeddings as with transformers' own attention."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from aerie.workers.config import ModelSource
from aerie.workers.vision import encoders
from aerie.workers.vision.config import vision_of
from aerie.workers.vision.encoders import QwenEncoder, build_encoder
from tests.support.targets.image_models import make_image_model

GRIDS = [(1, 2, 2), (1, 6, 4), (1, 10, 8)]  # with windows of 4 patches a side, some of them smaller


def _reference(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, _: Tensor, longest: int, __: int) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`, which has no CPU form. q, k, v: [rows, heads, dim]."""
    ends = bounds.tolist()
    assert longest == max(end - start for start, end in zip(ends, ends[1:], strict=False)) and ends[-1] == len(q)
    parts = []
    for start, end in zip(ends, ends[1:], strict=False):
        q_part, k_part, v_part = (x[start:end].transpose(0, 1) for x in (q, k, v))
        weights = (q_part @ k_part.transpose(1, 2) * q.shape[2] ** -0.5).softmax(2)
        parts.append((weights @ v_part).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@torch.inference_mode()
def test_embeddings_are_those_of_transformers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_image_model(tmp_path, kind)
    config = vision_of(ModelSource(path=str(tmp_path)))
    assert config is not None
    torch.manual_seed(0)
    encoder = build_encoder(config).eval()
    assert isinstance(encoder, QwenEncoder)
    pixels = [torch.randn(h * w, 3, config.patch_size**2) for _, h, w in GRIDS]
    expected = [encoder(x, grid) for x, grid in zip(pixels, GRIDS, strict=True)]
    launches: list[int] = []

    def attend(*arguments: Tensor) -> Tensor:
        launches.append(1)
        return _reference(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(encoders, "varlen_attn", attend)
    encoder.use_spans()
    for x, grid, wanted in zip(pixels, GRIDS, expected, strict=True):
        torch.testing.assert_close(encoder(x, grid), wanted, rtol=1e-5, atol=1e-5)
    assert len(launches) == len(GRIDS) * len(encoder.blocks)
