"""Block-scaled FP8 weights: targets answer as what their weights mean, whole and cut through blocks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.kernels.kv.stored_values import FP8
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.quantization.floats import FloatQuant, block_scheme, read_fp8
from tests.support.slow import slow
from tests.support.tiny_models import make_target
from tests.workers.layers.test_moe import load
from tests.workers.models.test_targets import check_greedy

BLOCK = (16, 24)  # of which neither divides all sizes
_QUANTISED = tuple(
    f"{each}.weight" for each in ("_proj", "_with_mqa", "in_proj_qkv", "in_proj_z", "in_proj_qkvz", ".w1", ".w2", ".w3")
)


def quantised(source: Path, folder: Path, block: tuple[int, int] = BLOCK, **quantization: Any) -> Path:
    """Two checkpoints of one model: FP8 with its scales in `folder`, and in folder / "plain" what those mean."""
    tensors, plain = load_file(str(source / "model.safetensors")), {}
    for name, weight in list(tensors.items()):
        plain[name] = weight
        if name.endswith(_QUANTISED) and "eh_proj" not in name:
            shape = [-(-size // step) for size, step in zip(weight.shape, block, strict=True)]
            padded = torch.zeros(shape[0] * block[0], shape[1] * block[1])
            padded[: weight.shape[0], : weight.shape[1]] = weight
            tiles = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
            scale = tiles.abs().amax((1, 3), keepdim=True) / torch.finfo(FP8).max
            whole = (tiles / scale).to(FP8)

            def joined(tiles: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
                return tiles.flatten(2, 3).flatten(0, 1)[: weight.shape[0], : weight.shape[1]].contiguous()

            tensors[name] = joined(whole)
            tensors[f"{name}_scale_inv"] = scale.squeeze(3).squeeze(1).contiguous()
            plain[name] = joined(whole.float() * scale)
    config = json.loads((source / "config.json").read_text())
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    for path, kept, added in (
        (folder, tensors, {"quantization_config": settings | quantization}),
        (folder / "plain", plain, {}),
    ):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config | added))
        save_file(kept, str(path / "model.safetensors"), metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "architecture",
    [
        "DeepseekV3",
        "Qwen3Moe",
        *slow("Llama", "Glm4Moe", "Gemma3", "Phi3"),
    ],
)
def test_a_target_answers_as_its_weights_mean(
    tmp_path: Path, architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_target(tmp_path / "t", architecture=architecture, num_hidden_layers=3)
    folder = quantised(source, tmp_path / "q")
    check_greedy(folder, like=folder / "plain")
    assert [r.message for r in caplog.records if "multiplied in the model's type" in r.message] == [
        f"model {folder}: weights of FP8 are multiplied in the model's type (this device has no product of FP8)"
    ]


@pytest.mark.parametrize("size,whole_experts", [(1, False), (2, False), (2, True)])
def test_shards_may_cut_blocks(tmp_path: Path, size: int, whole_experts: bool) -> None:
    """The same weights, to the bit, as those of a checkpoint of what they mean."""
    source = make_target(tmp_path / "t", architecture="DeepseekV3", num_hidden_layers=2)
    folder = quantised(source, tmp_path / "q")
    for rank in range(size):
        ours, plain = (load(path, TPGroup(rank, size), whole_experts).layers for path in (folder, folder / "plain"))
        for i in range(2):
            for name in ("qkv_a", "q_b_proj", "kv_b_proj", "o_proj"):
                one, other = (getattr(layers[i].self_attn, name).method.dense_weight() for layers in (ours, plain))
                assert torch.equal(one, other)
        for one, other in zip(*(layers[1].mlp.experts.method.dense_weights() for layers in (ours, plain)), strict=True):
            assert torch.equal(one, other)
        pairs = ((layers[0].mlp, layers[1].mlp.shared_experts) for layers in (ours, plain))
        for one, other in zip(*pairs, strict=True):
            assert torch.equal(one.gate_up.method.dense_weight(), other.gate_up.method.dense_weight())
            assert torch.equal(one.down_proj.method.dense_weight(), other.down_proj.method.dense_weight())
        kept = {parameter.dtype for parameter in ours.parameters()}
        assert FP8 not in kept  # its memory is given back


def test_a_half_type_is_rounded_to_once(tmp_path: Path) -> None:
    source = make_target(tmp_path / "t", num_hidden_layers=1)
    folder = quantised(source, tmp_path / "q")
    ours, plain = (load(path, dtype="bfloat16").layers[0].mlp.down_proj for path in (folder, folder / "plain"))
    assert ours.method.dtype == torch.bfloat16 and torch.equal(ours.method.dense_weight(), plain.method.dense_weight())


def test_dummies_are_finite(tmp_path: Path) -> None:
    folder = quantised(make_target(tmp_path / "t", architecture="Qwen3Moe", num_hidden_layers=1), tmp_path / "q")
    (folder / "model.safetensors").unlink()
    layer = load(folder, load_format="dummy").layers[0].mlp
    deviation = layer.experts.shape.width**-0.5  # as large an output as its input, so that layers do not route alike
    assert 0.9 < layer.experts.method.dense_weights()[1].std() / deviation < 1.1
    assert torch.isfinite(layer.partial(torch.ones(2, 64))).all()


def test_modules_that_are_left_are_named(tmp_path: Path) -> None:
    source = make_target(tmp_path / "t", num_hidden_layers=1)
    quant = read_fp8({"weight_block_size": [16, 16], "modules_to_not_convert": ["model.layers.1.mlp"]}, "model x")
    shape = load(source).layers[0].mlp.down_proj.shape

    def is_left(name: str) -> bool:
        return quant.linear_method([name], shape).kinds == ("weight",)

    assert is_left("lm_head") and is_left("model.layers.1.mlp.down_proj") and is_left("model.layers.61.eh_proj")
    assert not is_left("model.layers.11.mlp.down_proj") and not is_left("model.layers.0.mlp.down_proj")
    with pytest.raises(ValueError, match="only model.layers.1.mlp.up_proj are left unquantised; use"):
        quant.linear_method(["model.layers.0.mlp.gate_proj", "model.layers.1.mlp.up_proj"], shape)


@pytest.mark.parametrize(
    "quantization,message",
    [
        ({"weight_block_size": [128, 128], "fmt": "e5m2"}, "quantization_config.fmt='e5m2' is not supported; only"),
        ({"weight_block_size": [128, 128], "activation_scheme": "static"}, "activation_scheme='static' is not"),
    ],
)
def test_other_kinds_of_fp8_are_refused(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_fp8(quantization, "model x")
    assert read_fp8({"weight_block_size": [128, 64]}, "model x").scheme.block == (128, 64)  # type: ignore[attr-defined]
    assert FloatQuant(block_scheme((1, 1))).fallback(torch.device("cpu")) is not None


@pytest.mark.parametrize(
    "name,tensor,message",
    [
        ("up_proj.weight_scale_inv", None, "missing: model.layers.0.mlp.up_proj.weight_scale_inv$"),
        ("up_proj.weight", torch.zeros(96, 64), "up_proj.weight .*is torch.float32, not torch.float8_e4m3fn"),
        ("up_proj.weight_scale_inv", torch.zeros(5, 3), r"has shape \(5, 3\), config.json implies \(6, 3\)$"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str) -> None:
    folder = quantised(make_target(tmp_path / "t", num_hidden_layers=1), tmp_path / "q")
    tensors: dict[str, Any] = load_file(str(folder / "model.safetensors")) | {f"model.layers.0.mlp.{name}": tensor}
    save_file({k: v for k, v in tensors.items() if v is not None}, str(folder / "model.safetensors"))
    with pytest.raises(ValueError, match=message):
        load(folder)
