"""Text parts of transformers' models of images and text, through the adapter: the tokens that the whole model generates
from texts."""

from pathlib import Path

import pytest
import torch

from aerie.workers.config import ModelSource
from aerie.workers.models.loading import read_target_config
from tests.support.known_models import known_config
from tests.support.slow import slow
from tests.workers.models.test_qwen_vl import tokens_of
from tests.workers.models.test_targets import by_us

KINDS = ("aya_vision", "cohere2_vision", "deepseek_vl_hybrid", "exaone4_5", "idefics2", "lfm2_vl", "lighton_ocr")


@pytest.mark.parametrize("kind", ["internvl", *slow(*KINDS, "llava", "llava_onevision", "mistral3")])
def test_the_text_part_is_served(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForImageTextToText

    monkeypatch.setattr("aerie.workers.models.registry.ARCHITECTURES", {})
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(
        known_config(kind), dtype=torch.float32, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, *((0.5, 1.5) if "norm" in name else (-0.2, 0.2)))
        elif parameter.numel() and parameter.std() < 0.1:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.eval().save_pretrained(tmp_path)
    assert read_target_config(ModelSource(path=str(tmp_path), device="cpu"), 1).served_by is not None
    expected = tokens_of(model)
    assert len({tuple(answer) for answer in expected}) == len(expected)
    assert by_us(tmp_path) == expected
