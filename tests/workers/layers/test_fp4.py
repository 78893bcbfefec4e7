"""Checkpoints of 4-bit floats, MXFP4 and NVFP4: targets answer as what their weights mean, whole and cut through
blocks."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aerie.kernels.experts.gated import GPT_OSS
from aerie.kernels.experts.route import RouterLogits, Routing
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.span import Span
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.linear_method import LinearShape
from aerie.workers.layers.moe import Experts
from aerie.workers.models.moe import interleaved_experts
from aerie.workers.models.name_map import NameMap
from aerie.workers.models.weights import CheckpointTensor, load_weights
from aerie.workers.quantization.floats import GPT_OSS_MXFP4, FloatQuant, read_mxfp4
from aerie.workers.quantization.packed_experts import PackedExperts
from aerie.workers.quantization.table import read_quant_method
from tests.support.slow import slow
from tests.support.tiny_models import make_target
from tests.workers.layers.test_moe import check_speculation, load
from tests.workers.models.test_targets import check_greedy

# OCP Microscaling Formats 1.0, table 4: code of a positive number, times 8 for a negative one
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat((VALUES, -VALUES))
CONFIGS: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    "nvfp4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
LEFT = ("lm_head", "mlp.gate.", "shared_expert_gate", "in_proj_", "kv_a", "q_a", "eh_proj", "embed", "norm")


def quantised_matrix(weight: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a matrix, by kind, and what they mean.

    MXFP4: OCP Microscaling Formats 1.0, section 6.3. NVFP4: the scale of the matrix brings its largest block scale to
    448 (compressed-tensors `generate_gparam`, modelopt `NVFP4QTensor`).
    """
    group = 32 if name == "mxfp4" else 16
    blocks = weight.unflatten(1, (-1, group))
    most = blocks.abs().amax(-1)
    if name == "mxfp4":
        exponents = most.log2().floor().clamp(-100, 100) - 2
        scales, whole = torch.exp2(exponents), torch.ones(())
    else:
        whole = weight.abs().max() / (448.0 * 6.0)
        scales = (most / 6.0 / whole).to(torch.float8_e4m3fn).float()
    codes = (blocks / (scales * whole).unsqueeze(-1)).unsqueeze(-1).sub(VALUES).abs().argmin(-1)
    meaning = (VALUES[codes] * scales.unsqueeze(-1)).flatten(1) * whole
    flat = codes.flatten(1).to(torch.uint8)
    packed = flat[:, ::2] | (flat[:, 1::2] << 4)
    if name == "mxfp4":
        return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, meaning
    stored = scales.to(torch.float8_e4m3fn)
    if name == "nvfp4":
        given = {"weight_packed": packed, "weight_scale": stored, "weight_global_scale": (1 / whole).reshape(1)}
        return given | {"input_global_scale": torch.ones(1)}, meaning
    return {"weight": packed, "weight_scale": stored, "weight_scale_2": whole, "input_scale": torch.ones(())}, meaning


def quantised(source: Path, folder: Path, name: str, ignored: tuple[str, ...] = ()) -> Path:
    """Two checkpoints of one model: of 4-bit floats in `folder`, and in folder / "plain" what those mean."""
    given, tensors, plain = load_file(str(source / "model.safetensors")), {}, {}
    left = set()
    for path, weight in sorted(given.items()):
        module = path.removesuffix(".weight")
        if weight.dim() != 2 or any(part in path for part in (*LEFT, *ignored)):
            tensors[path] = plain[path] = weight
            if weight.dim() == 2:
                left.add(module)
            continue
        kinds, plain[path] = quantised_matrix(weight, name)
        tensors |= {f"{module}.{kind}": tensor.contiguous() for kind, tensor in kinds.items()}
    group = 32 if name == "mxfp4" else 16
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group}
    quantization: dict[str, Any] = CONFIGS[name] | {"ignore": sorted(left)}
    if name != "modelopt":
        inputs = {"num_bits": 4, "type": "float"} if name == "nvfp4" else None
        one = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        quantization["config_groups"] = {"group_0": one}
    config = json.loads((source / "config.json").read_text())
    for path, kept, added in ((folder, tensors, {"quantization_config": quantization}), (folder / "plain", plain, {})):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config | added))
        save_file(kept, str(path / "model.safetensors"), metadata={"format": "pt"})
    return folder


WIDE = {"moe_intermediate_size": 96}  # three blocks of 32


@pytest.mark.parametrize(
    "name,architecture,settings,ignored",
    [
        ("mxfp4", "Qwen3Moe", WIDE, ()),
        ("nvfp4", "Llama", {}, ()),
        ("modelopt", "DeepseekV3", {"kv_lora_rank": 32, "q_lora_rank": 48}, ()),
        *slow(("modelopt", "Qwen3_5Moe", {"layer_types": ["linear_attention", "full_attention"]}, ())),
    ],
)
def test_a_target_answers_as_its_weights_mean(
    tmp_path: Path,
    name: str,
    architecture: str,
    settings: dict[str, Any],
    ignored: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = make_target(tmp_path / "t", architecture=architecture, num_hidden_layers=2, **settings)
    folder = quantised(source, tmp_path / "q", name, ignored)
    check_greedy(folder, like=folder / "plain")
    told = [record.message for record in caplog.records if "activations stay in the model's type" in record.message]
    assert len(told) == (0 if name == "mxfp4" else 1)


@pytest.mark.parametrize("name,size", [("mxfp4", 4), ("nvfp4", 4), *slow(("mxfp4", 2), ("nvfp4", 2))])
@pytest.mark.parametrize("whole_experts", [False, True])
def test_ranks_may_cut_blocks(tmp_path: Path, name: str, size: int, whole_experts: bool) -> None:
    """Each rank's part of a layer of experts, and of a dense layer, is added up to what the weights mean."""
    settings: dict[str, Any] = {"num_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 4} | WIDE
    if name == "nvfp4":
        settings["moe_intermediate_size"] = 48
    source = make_target(tmp_path / "t", architecture="Qwen3Moe", num_hidden_layers=1, **settings)
    folder = quantised(source, tmp_path / "q", name, ("self_attn",) if name == "mxfp4" else ())
    plain = load(folder / "plain").layers[0]
    ranks = [load(folder, TPGroup(rank, size), whole_experts).layers[0] for rank in range(size)]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sum(rank.mlp.partial(x) for rank in ranks), plain.mlp.partial(x))
    heads = [x[:, 16 * rank * 4 // size : 16 * (rank + 1) * 4 // size] for rank in range(size)]
    parts = [rank.self_attn.o_proj.partial(own) for rank, own in zip(ranks, heads, strict=True)]
    torch.testing.assert_close(sum(parts), plain.self_attn.o_proj.partial(x))
    assert not any(parameter.dtype == torch.uint8 for parameter in ranks[0].parameters())  # its memory is given back


@pytest.mark.slow
def test_speculation_changes_no_token(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", architecture="Qwen3Moe", calm=0.01)
    check_speculation(tmp_path, quantised(target, tmp_path / "q", "nvfp4"), target)


def plain_block(width: int, hidden: int, num_experts: int) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """Transformers' experts and their tensors."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=hidden, intermediate_size=width, num_local_experts=num_experts)
    config._experts_implementation = "eager"
    theirs, generator = GptOssExperts(config).requires_grad_(False), torch.Generator().manual_seed(4)
    for parameter in theirs.parameters():
        parameter.normal_(0.0, 0.3, generator=generator)
    return theirs, dict(theirs.named_parameters())


def gpt_oss_block(width: int, hidden: int, num_experts: int) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """Transformers' experts, dequantised, and the tensors of the checkpoint's layout."""
    from transformers import GptOssConfig
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    generator = torch.Generator().manual_seed(4)
    config = GptOssConfig(hidden_size=hidden, intermediate_size=width, num_local_experts=num_experts)
    config._experts_implementation = "eager"
    theirs, stored = GptOssExperts(config), {}
    for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, (num_experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        bias = torch.randn(num_experts, rows, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": bias}
        getattr(theirs, name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        getattr(theirs, f"{name}_bias").data = bias
    return theirs.requires_grad_(False), stored


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("size,whole", [(1, False), (2, False), (3, False), (2, True)])
def test_experts_of_gpt_oss_are_those_of_transformers(size: int, whole: bool, plain: bool) -> None:
    """Gate and up rows alternate, activations are clamped, matrices have biases. Two ranks cut blocks of 32. plain: a
    checkpoint in float32; three ranks' shares of it are not aligned to 16 bytes."""
    width, hidden, num_experts, rows, k = 90 if plain else 96, 64, 4, 7, 2
    theirs, stored = (plain_block if plain else gpt_oss_block)(width, hidden, num_experts)
    generator = torch.Generator().manual_seed(5)
    x, logits = torch.randn(rows, hidden, generator=generator), torch.randn(rows, num_experts, generator=generator)
    routing = Routing(num_experts, k, normalise=True)
    chosen, weight = RouterLogits(logits, None, routing).choose()
    expected = theirs(x, chosen, weight)
    total = torch.zeros_like(expected)
    for rank in range(size):
        experts = Experts(num_experts, hidden, width, TPGroup(rank, size), k, 0, whole, GPT_OSS, biased=True)
        if not plain:
            experts.method = PackedExperts(experts.shape, GPT_OSS_MXFP4)
        names = NameMap(
            {"mlp.experts": "model.layers.0.mlp.experts.{expert}.{part}"},
            packed=interleaved_experts("model.layers.{layer}", num_experts),
        )
        tensors = (CheckpointTensor(f"model.layers.0.mlp.experts.{name}", full, "f") for name, full in stored.items())
        load_weights(torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": experts})}), tensors, names, "model x")
        experts.finish(GEMMOptions())
        total += experts.method.multiply(x, RouterLogits(logits, None, routing))
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)  # sums of 96 in another order


def test_experts_of_gpt_oss_in_fp8_are_refused() -> None:
    shape = Experts(4, 64, 96, TPGroup(0, 1), 2, activation=GPT_OSS, biased=True).shape
    quant = read_quant_method(
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}, "model x"
    )
    with pytest.raises(ValueError, match="experts in FP8 with biases or another activation than SiLU"):
        quant.experts_method(["model.layers.0.mlp.experts.0.gate_proj"], shape)


CONFIG = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}}}


@pytest.mark.parametrize(
    "quantization,message",
    [
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quant_algo='W4A8_AWQ' is not supported; only 'NVFP4'",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size=32 is not supported"),
        ({"quant_method": "compressed-tensors"} | CONFIG, "weights.group_size=None is not supported for 4"),
    ],
)
def test_other_floats_are_refused(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"model x: quantization_config.*{message}"):
        read_quant_method({"quantization_config": quantization}, "model x")


def test_modules_that_are_left_are_named_by_patterns() -> None:
    settings = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "model.layers.0.self_attn*", "re:.*visual.*"]}
    for nested in (settings, {"quantization": settings}):
        quant = read_quant_method({"quantization_config": {"quant_method": "modelopt"} | nested}, "model x")
        assert isinstance(quant, FloatQuant)
        names = ("lm_head", "model.layers.0.self_attn.q_proj", "model.visual.0", "model.layers.10.self_attn.q_proj")
        assert [quant.ignores(name) for name in names] == [True, True, True, False]
    gpt_oss = read_mxfp4({"modules_to_not_convert": ["model.layers.*.self_attn"]}, "model x")
    shape = LinearShape.stacked([("", Span.whole(64))], Span.whole(64))
    assert gpt_oss.linear_method(["model.layers.0.mlp.gate"], shape).kinds == ("weight",)


@pytest.mark.parametrize(
    "name,tensor,message",
    [
        ("up_proj.weight_scale", None, "missing: model.layers.0.mlp.up_proj.weight_scale$"),
        ("up_proj.weight_packed", torch.zeros(96, 64), "up_proj.weight_packed .*is torch.float32, not torch.uint8"),
        ("up_proj.weight_packed", torch.zeros(96, 64, dtype=torch.uint8), r"has shape \(96, 64\), config.json implies"),
        ("up_proj.weight_global_scale", torch.zeros(2), r"is torch.float32 \[2\], not one float32"),
        ("up_proj.input_global_scale", None, ""),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, name: str, tensor: Tensor | None, message: str) -> None:
    folder = quantised(make_target(tmp_path / "t", num_hidden_layers=1), tmp_path / "q", "nvfp4")
    tensors: dict[str, Any] = load_file(str(folder / "model.safetensors")) | {f"model.layers.0.mlp.{name}": tensor}
    save_file({k: v for k, v in tensors.items() if v is not None}, str(folder / "model.safetensors"))
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        load(folder)


def test_a_scale_that_is_no_number_is_refused() -> None:
    stored = {"blocks": torch.zeros(1, 16, dtype=torch.uint8), "scales": torch.full((1, 1), 255, dtype=torch.uint8)}
    with pytest.raises(ValueError, match="a scale of MXFP4 is NaN"):
        GPT_OSS_MXFP4.read(stored)
    stored["scales"] = torch.tensor([[0]], dtype=torch.uint8)
    assert GPT_OSS_MXFP4.read(stored).scales.double().item() == 2.0**-127


@pytest.mark.parametrize("name", CONFIGS)
def test_dummies_are_finite(tmp_path: Path, name: str) -> None:
    source = make_target(tmp_path / "t", architecture="Qwen3Moe", num_hidden_layers=1, **WIDE)
    folder = quantised(source, tmp_path / "q", name)
    (folder / "model.safetensors").unlink()
    layer = load(folder, load_format="dummy").layers[0]
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    assert 0.5 < layer.self_attn.qkv.method.multiply(x, None).std() < 2.0
    assert torch.isfinite(layer.mlp.partial(x)).all()
