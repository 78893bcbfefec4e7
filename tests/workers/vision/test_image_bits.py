"""An image's embeddings have the same bits alone, after others, and in parts between other images: a tower computes one
image at a time, by kernels and graphs that its size alone chooses. So `deterministic: true` covers images."""

import itertools
from pathlib import Path

import pytest
import torch

from aerie.workers.config import ModelSource
from aerie.workers.models.loading import read_target_config
from aerie.workers.prompt_inputs import Encoding, Image
from aerie.workers.vision.config import vision_of
from aerie.workers.vision.tower import VisionTower, image_sizes
from tests.support.targets.image_models import make_image_model

GRIDS = [(1, 4, 4), (1, 12, 8), (1, 20, 16)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_an_image_has_the_same_bits_alone_beside_others_and_in_parts(kind: str, device: str, tmp_path: Path) -> None:
    make_image_model(tmp_path, kind)
    source, dtype = ModelSource(path=str(tmp_path)), torch.float32 if device == "cpu" else torch.bfloat16
    config, target = vision_of(source), read_target_config(source, 1)
    assert config is not None
    sizes = image_sizes(config, target, dtype)
    tower = VisionTower(config, source, sizes, dtype, torch.device(device), captures=device == "cuda")
    generator = torch.Generator().manual_seed(0)
    images = []
    for grid in GRIDS:
        patches = grid[1] * grid[2]
        values = torch.randint(0, 256, (patches * config.patch_bytes,), dtype=torch.uint8, generator=generator)
        images.append(Image.of(0, patches // config.merge_size**2, grid, bytes(values.numpy())))
    alone = []
    for image in images:
        tower.clear()
        alone.append(tower.rows(image).clone())
    assert all(rows.isfinite().all() and rows.std() > 0 for rows in alone)
    for order in itertools.permutations(range(len(images))):
        tower.clear()
        first, *others = order
        tower.advance(Encoding(images[first], 1))
        for i in others:
            assert torch.equal(tower.rows(images[i]), alone[i]), (order, i)
        tower.advance(Encoding(images[first]))
        assert torch.equal(tower.rows(images[first]), alone[first]), order
