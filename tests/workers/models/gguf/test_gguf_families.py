"""Models of GGUF files, written by llama.cpp's library, against transformers with the checkpoints that they mean."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.models.gguf.folder import checkpoint_folder
from aerie.workers.models.loading import load_target, read_target_config
from aerie.workers.models.weights import weight_formats
from tests.support.slow import slow
from tests.support.targets.gguf_files import TypeOf, plain, write_gguf
from tests.support.tiny_models import make_eagle, make_target
from tests.workers.models.test_targets import by_transformers, by_us

SIXTEEN = {"head_dim": 16, "query_pre_attn_scalar": 16}  # as in all Gemmas but those of 27B


def folder_of(target: Path, tmp_path: Path, type_of: TypeOf = plain) -> Path:
    return checkpoint_folder(write_gguf(target, tmp_path / "model.gguf", type_of), tmp_path / "cache")


@pytest.mark.parametrize(
    "settings",
    [
        {"architecture": "Llama", "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
        {"architecture": "Qwen3Moe", "moe_intermediate_size": 32},
        {"architecture": "Gemma3", "sliding_window_pattern": 6, "num_hidden_layers": 7, **SIXTEEN},
        {"architecture": "Phi3", "sliding_window": 12, "partial_rotary_factor": 0.5},
        {"architecture": "GptOss"},
        *slow(
            {"architecture": "Llama", "tie_word_embeddings": True},
            {"architecture": "Mistral", "sliding_window": None},
            {"architecture": "Qwen2"},
            {"architecture": "Qwen3", "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0}},
            {"architecture": "Qwen2Moe", "norm_topk_prob": False},
            {"architecture": "Gemma2", **SIXTEEN},
        ),
    ],
    ids=lambda settings: settings["architecture"],
)
def test_greedy_tokens_are_those_of_the_checkpoint(tmp_path: Path, settings: dict[str, Any]) -> None:
    target = make_target(tmp_path / "target", **settings)
    found = by_us(folder_of(target, tmp_path))
    assert found == by_transformers(target, found)


def test_packed_and_dequantised_types_answer_as_they_mean_on_one_and_two_ranks(tmp_path: Path) -> None:
    """Q8_0, Q4_0 and Q5_0 have packed products; Q4_1 has none. Two ranks cut a block of the MLP of 96 in the middle."""
    types = {"q_proj": Type.Q8_0, "k_proj": Type.Q8_0, "v_proj": Type.Q4_1, "o_proj": Type.Q4_0, "down_proj": Type.Q5_0}

    def type_of(name: str, _: Any) -> Type:
        return types.get(name.split(".")[-2], Type.F16 if "up_proj" in name else Type.BF16)

    folder = folder_of(make_target(tmp_path / "target"), tmp_path, type_of)
    config = read_target_config(ModelSource(path=str(folder)), 1)
    model = load_target(ModelSource(path=str(folder), dtype="float32"), config, SOLO, torch.device("cpu"), 8)
    assert weight_formats(model) == "unquantised (5), Q8_0 and Q4_1, dequantised (4), Q4_0 (4), Q5_0 (4)"
    found = by_us(folder)
    assert by_us(folder, 2) == found == by_transformers(tmp_path / "means", found)


def test_experts_in_mxfp4_and_q8_0_answer_as_they_mean(tmp_path: Path) -> None:
    for kind, quant, settings in (
        ("GptOss", Type.MXFP4, {}),
        ("Qwen3Moe", Type.Q8_0, {"moe_intermediate_size": 32}),
    ):
        own = tmp_path / kind
        own.mkdir()
        target = make_target(own / "target", architecture=kind, **settings)
        folder = folder_of(target, own, lambda name, _, quant=quant: quant if "experts" in name else Type.Q8_0)
        found = by_us(folder)
        assert found == by_transformers(own / "means", found)


def test_a_draft_of_the_target_and_its_own_text_change_no_token(tmp_path: Path) -> None:
    """The draft shares the embedding and the head of the file."""
    target = make_target(tmp_path / "target", calm=0.1)
    folder = folder_of(target, tmp_path, lambda name, _: Type.Q8_0)
    head = make_eagle(tmp_path / "head", target)
    plain_answers = by_us(folder)
    chain = SpeculativeConfig(str(head), "eagle", num_steps=3, top_k=1, num_draft_tokens=4)
    tree = SpeculativeConfig(str(head), "eagle", num_steps=3, top_k=2, num_draft_tokens=6)
    copied = SpeculativeConfig(str(folder), "suffix", num_steps=4, num_draft_tokens=5)
    for speculative in (chain, tree, copied):
        assert by_us(folder, speculative=speculative) == plain_answers
