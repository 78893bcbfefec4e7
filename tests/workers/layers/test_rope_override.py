"""`model.rope_scaling`: RoPE's settings in place of config.json's."""

import json
from pathlib import Path

import pytest

from aerie.workers.config import ModelSource
from aerie.workers.layers.rotary import with_rope_scaling
from aerie.workers.models.loading import read_target_config
from tests.support import MODELS

PUBLISHED = Path(__file__).parents[2] / "deploy" / "config" / "published"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_yarn_lengthens_the_context_of_a_published_qwen3() -> None:
    """The model card: 131,072 tokens with these settings."""
    raw = json.loads((PUBLISHED / "Qwen3-8B.json").read_text())
    assert with_rope_scaling(raw, {}, "x") is raw
    found = with_rope_scaling(raw, YARN, "x")
    section = found.get("rope_parameters") or found["rope_scaling"]
    assert found["max_position_embeddings"] == 131072
    assert section.items() >= YARN.items()
    assert (section.get("rope_theta") or found["rope_theta"]) == 1000000


def test_an_older_name_of_the_kind_replaces_the_present_one() -> None:
    raw = {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "max_position_embeddings": 100}
    found = with_rope_scaling(raw, {"type": "linear", "factor": 3.0}, "x")
    assert found["rope_parameters"]["rope_type"] == "linear" and found["rope_parameters"]["rope_theta"] == 5.0
    assert found["max_position_embeddings"] == 300


def test_the_text_part_of_a_model_of_images_is_changed() -> None:
    raw = {"text_config": {"rope_parameters": {"mrope_section": [1]}, "max_position_embeddings": 64}, "a": 1}
    found = with_rope_scaling(raw, YARN, "x")
    assert found["a"] == 1 and found["text_config"]["max_position_embeddings"] == 131072
    assert found["text_config"]["rope_parameters"]["mrope_section"] == [1]


def test_a_target_is_read_with_it() -> None:
    config = read_target_config(ModelSource(path=str(MODELS / "target"), rope_scaling=YARN), 1)
    assert config.rope.kind == "yarn" and config.rope.factor == 4.0 and config.max_position == 131072


@pytest.mark.parametrize(
    ("raw", "scaling", "message"),
    [
        ({"rope_parameters": {"full_attention": {}}}, YARN, "have different settings of RoPE; change config.json"),
        ({}, YARN | {"factor": "four"}, "must be numbers"),
    ],
)
def test_what_cannot_be_replaced_is_refused(raw: dict[str, object], scaling: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_rope_scaling(raw, scaling, "model x")
