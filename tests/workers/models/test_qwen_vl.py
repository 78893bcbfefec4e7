"""Text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: the tokens that transformers' models of images and text generate
from texts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource
from aerie.workers.models.loading import read_target_config
from tests.support.slow import slow
from tests.support.target_answers import CHAIN, head_for
from tests.support.tiny_models import VOCAB
from tests.workers.models.test_targets import by_us, prompts

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
VISION = {"depth": 1, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1}
# model_type -> fields of the text part, and of the tower
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, {"embed_dim": 16, "hidden_size": 64}),
    "qwen2_5_vl": (
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "tie_word_embeddings": True},
        {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": (
        {
            "head_dim": 32,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
        },
        {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    ),
}
KINDS["qwen3_vl_moe"] = (
    KINDS["qwen3_vl"][0] | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    KINDS["qwen3_vl"][1],
)


def make(folder: Path, kind: str) -> Any:
    """Save a tiny random model; return it."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    text, vision = KINDS[kind]
    tied = {"tie_word_embeddings": text.get("tie_word_embeddings", False)}
    config = CONFIG_MAPPING[kind](text_config=TEXT | text, vision_config=VISION | vision, **tied)
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    return model


def tokens_of(model: Any) -> list[list[int]]:
    answers = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("kind", [*slow("qwen2_vl", "qwen2_5_vl"), "qwen3_vl"])
def test_the_text_part_is_served(tmp_path: Path, kind: str) -> None:
    expected = tokens_of(make(tmp_path, kind))
    config = read_target_config(ModelSource(path=str(tmp_path)), 2)
    assert config.served_by is None and config.architecture.endswith("ForConditionalGeneration")
    assert by_us(tmp_path) == expected
    assert by_us(tmp_path, speculative=SpeculativeConfig(method="suffix")) == expected


def test_fields_may_stand_beside_the_towers(tmp_path: Path) -> None:
    """As in files of Qwen2-VL and Qwen2.5-VL that were published before text_config."""
    make(tmp_path, "qwen2_5_vl")
    source = ModelSource(path=str(tmp_path))
    nested = read_target_config(source, 1)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw.pop("text_config") | raw))
    assert read_target_config(source, 1) == nested


@pytest.mark.parametrize("as_published", [True, *slow(False)])
def test_experts_of_the_text_part_are_served(tmp_path: Path, as_published: bool) -> None:
    """On one and two ranks, with chains and suffix drafts; stacked with inputs first, as published, and with outputs
    first, as transformers 5 saves them."""
    target = tmp_path / "target"
    expected = tokens_of(make(target, "qwen3_vl_moe"))
    path = str(target / "model.safetensors")
    tensors = load_file(path)
    stacked = {name: each for name, each in tensors.items() if ".experts." in name}
    assert len(stacked) == 6 and {tuple(each.shape) for each in stacked.values()} == {(6, 80, 64), (6, 64, 40)}
    if as_published:
        tensors |= {name: each.mT.contiguous() for name, each in stacked.items()}
        save_file(tensors, path, metadata={"format": "pt"})
    assert by_us(target) == expected
    if not as_published:
        return
    head = head_for(read_target_config(ModelSource(path=path.rpartition("/")[0]), 1), tmp_path)
    assert by_us(target, 2, SpeculativeConfig(str(head), "eagle3", *CHAIN)) == expected
    assert by_us(target, 2, SpeculativeConfig(method="suffix")) == expected


def test_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "qwen3_vl_moe")
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"]["moe_intermediate_size"] = 48
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"experts\.down_proj .* has shape \(6, 64, 40\), config.json implies"):
        by_us(tmp_path)
