"""A GGUF file as the target of a training: the dequantised weights in transformers' module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM

from aerie.speculative.training import TrainingError
from aerie.speculative.training.commands import load_target
from aerie.workers.models.gguf.folder import checkpoint_folder
from tests.support.targets.gguf_files import write_gguf
from tests.support.tiny_models import make_target

CPU = torch.device("cpu")
TYPES = {"q_proj": Type.Q8_0, "v_proj": Type.Q4_1, "o_proj": Type.Q4_0, "down_proj": Type.Q5_0}


def type_of(name: str, _: Any) -> Type:
    return TYPES.get(name.split(".")[-2], Type.F32)


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_target_computes_what_the_file_means(tmp_path: Path, tied: bool) -> None:
    source = make_target(tmp_path / "target", architecture="Llama", tie_word_embeddings=tied)
    folder = checkpoint_folder(write_gguf(source, tmp_path / "model.gguf", type_of), tmp_path / "cache")
    _, model = load_target(folder, CPU, torch.float32)
    means = AutoModelForCausalLM.from_pretrained(tmp_path / "means", dtype=torch.float32).eval()
    tokens = torch.arange(3, 20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, means(tokens).logits, atol=1e-5, rtol=1e-5)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())


def test_a_gguf_target_that_transformers_has_in_another_form_is_refused(tmp_path: Path) -> None:
    source = make_target(tmp_path / "target", architecture="Qwen3Moe", moe_intermediate_size=32)
    folder = checkpoint_folder(write_gguf(source, tmp_path / "model.gguf"), tmp_path / "cache")
    with pytest.raises(TrainingError, match="transformers' module and the file differ in"):
        load_target(folder, CPU, torch.float32)
