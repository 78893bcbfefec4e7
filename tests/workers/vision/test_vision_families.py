"""Families with images: each names its reader and its encoder, and an unknown one is not served as another."""

from typing import cast, get_args

import pytest

from aerie.workers.vision.config import _READERS, FAMILIES, Kind, VisionConfig, VisionFamily
from aerie.workers.vision.encoders import ENCODERS, build_encoder


def test_each_kind_has_a_reader_an_encoder_and_a_family() -> None:
    kinds = set(get_args(Kind))
    assert kinds == set(_READERS) == set(ENCODERS) == {family.kind for family in FAMILIES.values()}


def test_an_unknown_kind_is_not_built_as_qwen() -> None:
    family = VisionFamily(
        cast(Kind, "other"), "qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionConfig"
    )
    config = VisionConfig(family, {}, 1, 1, 14, 2, 2, 32, 0, 4096, whole=False, has_mrope=True)
    with pytest.raises(KeyError, match="other"):
        build_encoder(config)
