"""Hybrids against transformers, from checkpoints as they are published: packed, stacked, within a model of images."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.kernels.capability import Capability
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.models.registry import family_of
from tests.support.ranks import forked_ranks  # noqa: F401 - every test has it
from tests.support.slow import slow
from tests.support.tiny_models import add_qwen_mtp, make_target
from tests.workers.layers.test_block_fp8 import quantised
from tests.workers.models.test_targets import by_transformers, by_us, check_greedy, requests_of

KINDS = ("linear_attention", "full_attention")


@pytest.mark.parametrize("architecture", ["Qwen3_5Moe", "Qwen3Next", *slow("Qwen3_5")])
@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, architecture: str, seed: int) -> None:
    """The last layer is a recurrent one, or one of attention."""
    layers = {"layer_types": [KINDS[i % 3 == 2] for i in range(6)], "num_hidden_layers": 6} if seed else {}
    target = make_target(tmp_path / "target", seed=seed, architecture=architecture, **layers)
    expected = by_us(target)
    assert expected == by_transformers(target, expected)
    if seed == 0 and architecture == "Qwen3_5Moe":
        assert by_us(target, tensor_parallel=2) == expected


# Ranks get a key head each, or two, and K/V heads that two or four of them repeat.
EIGHT_HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 8}
EIGHT_HEADS |= {"linear_num_value_heads": 16}


@pytest.mark.parametrize(
    "architecture,ranks,method",
    [("Qwen3_5Moe", 4, None), *slow(("Qwen3_5", 4, "mtp"), ("Qwen3Next", 8, "mtp"), ("Qwen3_5Moe", 8, None))],
)
def test_more_ranks_than_kv_heads_are_the_model(
    tmp_path: Path, architecture: str, ranks: int, method: str | None
) -> None:
    """With MTP, trees of 12 are verified over the states of each rank's own heads, and some drafts are right."""
    target = make_target(tmp_path / "target", calm=0.003, architecture=architecture, **EIGHT_HEADS)
    expected, speculative = by_transformers(target), None
    if method is not None:
        add_qwen_mtp(target, copying=True)
        speculative = SpeculativeConfig("", "mtp", 3, 4, 12)
    found = requests_of(target, ranks, speculative)
    assert [request.output for request in found] == expected
    accepted = sum(count * rounds for each in found for count, rounds in enumerate(each.acceptance_histogram))
    assert method is None or accepted > 10


@pytest.mark.parametrize("settings", [{"head_dim": 32, "linear_num_key_heads": 4, "tie_word_embeddings": True}])
def test_sizes_of_heads_are_free(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings |= {"linear_key_head_dim": 8, "linear_num_value_heads": 4}
    target = make_target(tmp_path / "target", architecture="Qwen3_5", **settings)
    check_greedy(target)


def within_a_model_of_images(target: Path, folder: Path) -> Path:
    """The checkpoint as Qwen publishes it: the text model's names and configuration within the whole, experts stacked
    unless they are FP8, a vision tower and a module for drafting beside."""
    config = json.loads((target / "config.json").read_text())
    whole = {"vision_config": {"depth": 1}}
    whole["architectures"] = [name.replace("CausalLM", "ConditionalGeneration") for name in config["architectures"]]
    is_fp8 = "quantization_config" in config
    if is_fp8:
        whole["quantization_config"] = config.pop("quantization_config")
    tensors, stacks = {}, dict[str, dict[int, dict[str, torch.Tensor]]]()
    for name, tensor in load_file(str(target / "model.safetensors")).items():
        name = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        layer, experts, rest = name.partition(".mlp.experts.")
        if experts and not is_fp8:
            number, part, _ = rest.split(".")
            stacks.setdefault(layer, {}).setdefault(int(number), {})[part] = tensor
        else:
            tensors[name] = tensor
    for layer, experts_of in stacks.items():
        ordered = [parts for _, parts in sorted(experts_of.items())]
        gate_up = [torch.cat((parts["gate_proj"], parts["up_proj"])) for parts in ordered]
        tensors[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{layer}.mlp.experts.down_proj"] = torch.stack([parts["down_proj"] for parts in ordered])
    tensors |= {name: torch.zeros(3) for name in ("model.visual.patch_embed.proj.weight", "mtp.fc.weight")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole | {"text_config": config}))
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


@pytest.mark.slow  # `test_fp8_checkpoints_answer_as_their_weights_mean` serves one
def test_the_text_model_of_a_model_of_images_is_served(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", architecture="Qwen3_5Moe")
    whole = within_a_model_of_images(target, tmp_path / "whole")
    check_greedy(whole, like=target)


@pytest.mark.parametrize("architecture", ["Qwen3_5Moe", *slow("Qwen3_5", "Qwen3Next")])
def test_fp8_checkpoints_answer_as_their_weights_mean(tmp_path: Path, architecture: str) -> None:
    """Blocks of weights have scales; what the published checkpoints list stays in bf16."""
    target = make_target(tmp_path / "target", architecture=architecture)
    is_packed = architecture == "Qwen3Next"
    prefix = "model" if is_packed else "model.language_model"
    left = ("linear_attn.in_proj_ba",) if is_packed else ("linear_attn.in_proj_a", "linear_attn.in_proj_b")
    left += ("linear_attn.conv1d", "mlp.gate", "mlp.shared_expert_gate")
    names = [f"{prefix}.layers.{i}.{module}" for i in range(4) for module in left]
    folder = quantised(target, tmp_path / "q", modules_to_not_convert=["lm_head", f"{prefix}.embed_tokens", *names])
    expected = by_transformers(folder / "plain")
    served = folder if is_packed else within_a_model_of_images(folder, tmp_path / "whole")
    assert by_us(served) == expected
    assert by_us(served, tensor_parallel=2) == expected


def test_a_packed_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", architecture="Qwen3Next")
    path = str(target / "model.safetensors")
    tensors = load_file(path)
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    tensors[name] = tensors[name][:-2].clone()
    del tensors["model.layers.0.linear_attn.in_proj_ba.weight"]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"missing: .*in_proj_ba.weight.*wrong: {name} .*has shape"):
        by_us(target)


HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3 is no multiple of linear_num_key_heads=2"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim=3 is not supported; only 4 is"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported; only True is"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types: must be 4"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has no 'full_attention'"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 of head_dim=16: must give an even number"),
        ({"linear_key_head_dim": None}, "lacks 'linear_key_head_dim'"),
    ],
)
def test_what_would_be_ignored_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family_of("Qwen3_5ForCausalLM", "model x").read_config(HYBRID | changes, "model x")


def test_sizes_without_kernels_are_refused_on_a_gpu() -> None:
    config = family_of("Qwen3_5ForCausalLM", "model x").read_config(HYBRID | {"linear_key_head_dim": 24}, "model x")
    config.check_device(Capability("cpu"), torch.float32, "model x")
    with pytest.raises(ValueError, match="linear_key_head_dim=24: on a GPU it is one of 16, 32, 64, 128; serve"):
        config.check_device(Capability("cuda", (9, 0)), torch.bfloat16, "model x")


def test_ranks_share_key_heads() -> None:
    config = family_of("Qwen3_5ForCausalLM", "model x").read_config(HYBRID, "model x")
    with pytest.raises(ValueError, match=r"tensor_parallel=4: .*linear_num_key_heads=2\); try one of \[1, 2\]"):
        config.check_shards(4, "model x")
