"""Families with images: each names its reader and its encoder, and an unknown one is not served as another."""

from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch

from aerie.workers.config import ModelSource
from aerie.workers.vision.config import _READERS, FAMILIES, Kind, VisionConfig, VisionFamily, read_vision
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


QWEN_2 = {
    "depth": 32,
    "num_heads": 16,
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
}
QWEN_2 |= {"temporal_patch_size": 2}
QWEN_2_5 = QWEN_2 | {"hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
QWEN_2_5 |= {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2}
QWEN_3 = {"depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "in_channels": 3, "num_heads": 16}
QWEN_3 |= {"initializer_range": 0.02, "intermediate_size": 4304, "num_position_embeddings": 2304, "patch_size": 16}
QWEN_3 |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
GEMMA_4 = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
GEMMA_4 |= {
    "num_key_value_heads": 16,
    "head_dim": 72,
    "global_head_dim": 72,
    "patch_size": 16,
    "pooling_kernel_size": 3,
}
GEMMA_4 |= {"position_embedding_size": 10240, "default_output_length": 280, "rms_norm_eps": 1e-6, "standardize": True}
GEMMA_4 |= {"use_clipped_linears": False, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304}
SIGLIP |= {"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False}
TEXT = {"hidden_size": 5376, "pad_token_id": 0}
# fields of published config.json beside the text's, layers, patches of a token, and patches of the largest image
PUBLISHED: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "Qwen2VLForConditionalGeneration": (
        {"image_token_id": 151655, "vision_config": QWEN_2 | {"embed_dim": 1280, "mlp_ratio": 4, "hidden_size": 3584}},
        32,
        4,
        21399,
    ),
    "Qwen2_5_VLForConditionalGeneration": ({"image_token_id": 151655, "vision_config": QWEN_2_5}, 32, 4, 21399),
    "Qwen3VLForConditionalGeneration": (
        {
            "image_token_id": 151655,
            "vision_config": QWEN_3 | {"out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]},
        },
        27,
        4,
        16384,
    ),
    "Qwen3_5ForConditionalGeneration": (
        {
            "image_token_id": 248056,
            "vision_config": QWEN_3
            | {"out_hidden_size": 5120, "deepstack_visual_indexes": [], "model_type": "qwen3_5"},
        },
        27,
        4,
        16384,
    ),
    "Gemma3ForConditionalGeneration": (
        {"image_token_index": 262144, "mm_tokens_per_image": 256, "vision_config": SIGLIP, "text_config": TEXT},
        27,
        16,
        4096,
    ),
    "Gemma4ForConditionalGeneration": (
        {"image_token_id": 258880, "vision_config": GEMMA_4, "text_config": TEXT},
        27,
        9,
        2520,
    ),
}


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_published_towers_are_built(tmp_path: Path, architecture: str) -> None:
    """With all fields of the published files, also those without effect on images."""
    fields, num_layers, merged, max_patches = PUBLISHED[architecture]
    (tmp_path / "preprocessor_config.json").write_text("{}")
    config = read_vision({"architectures": [architecture], **fields}, ModelSource(path=str(tmp_path)))
    assert config is not None
    with torch.device("meta"):
        encoder = build_encoder(config)
        assert list(encoder.fuse(has_values=False)) == []
    assert len(encoder.blocks) == num_layers and config.merge_size**2 == merged and config.max_patches == max_patches
    assert config.hidden_size == fields.get("text_config", fields["vision_config"]).get(
        "hidden_size" if "text_config" in fields or "embed_dim" in fields["vision_config"] else "out_hidden_size"
    )
