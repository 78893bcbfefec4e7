"""FP8 weights with a scale per matrix or per output, as several tools write them: targets answer as what their weights
mean, on any number of ranks; scales of inputs are not needed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.kernels.kv.stored_values import FP8
from aerie.kernels.span import Span
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.experts_method import ExpertsShape, UnquantizedExperts
from aerie.workers.layers.linear_method import LinearShape
from aerie.workers.quantization import floats
from aerie.workers.quantization.floats import PER_TOKEN, FloatQuant, block_scheme
from aerie.workers.quantization.table import read_quant_method
from tests.support.slow import slow
from tests.support.tiny_models import make_target
from tests.workers.layers.test_moe import load
from tests.workers.models.test_targets import check_greedy


def group(weights: str, inputs: str, dynamic: bool) -> dict[str, Any]:
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    one = {
        "targets": ["Linear"],
        "weights": eight | {"strategy": weights, "dynamic": False},
        "input_activations": eight | {"strategy": inputs, "dynamic": dynamic},
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": one}, "ignore": ["lm_head"]}


# quantization_config, and whether inputs have a scale per tensor
CONFIGS: dict[str, tuple[dict[str, Any], bool]] = {
    "fp8 static": ({"quant_method": "fp8", "activation_scheme": "static"}, True),
    "fp8 dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["o_proj"]}, False),
    "tensor": (group("tensor", "tensor", False), True),
    "channel": (group("channel", "tensor", False), True),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*self_attn*"]},
        True,
    ),
    "modelopt channel": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]},
        False,
    ),
}


def quantised(source: Path, folder: Path, name: str) -> Path:
    """Two checkpoints of one model: FP8 in `folder`, and in folder / "plain" what that means."""
    settings, has_input_scale = CONFIGS[name]
    tensors, plain = load_file(str(source / "model.safetensors")), {}
    left = settings.get("ignored_layers", ()) or [each.strip("*") for each in settings.get("exclude_modules", ())]
    by_row = "channel" in name
    for path, weight in list(tensors.items()):
        plain[path] = weight
        if path.endswith("_proj.weight") and not any(each in path for each in left):
            scale = weight.abs().amax(1 if by_row else (0, 1), keepdim=True) / torch.finfo(FP8).max
            tensors[path] = (weight / scale).to(FP8)
            module = path.removesuffix(".weight")
            shape = (-1,) if name == "modelopt channel" else (-1, 1) if by_row else () if "modelopt" in name else (1,)
            tensors[f"{module}.weight_scale"] = scale.reshape(shape).contiguous()
            if has_input_scale:
                tensors[f"{module}.input_scale"] = torch.ones(())
            plain[path] = tensors[path].float() * scale
    config = json.loads((source / "config.json").read_text())
    for path, kept, added in ((folder, tensors, {"quantization_config": settings}), (folder / "plain", plain, {})):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config | added))
        save_file(kept, str(path / "model.safetensors"), metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(("Llama", name) for name in CONFIGS if name not in ("tensor", "modelopt channel")),
        ("Qwen3Moe", "modelopt channel"),
        *slow(("Qwen3Moe", "tensor"), ("Llama", "tensor"), ("Llama", "modelopt channel")),
    ],
)
def test_a_target_answers_as_its_weights_mean(tmp_path: Path, architecture: str, name: str) -> None:
    source = make_target(tmp_path / "t", architecture=architecture, num_hidden_layers=2)
    folder = quantised(source, tmp_path / "q", name)
    check_greedy(folder, like=folder / "plain")


def test_every_rank_has_the_scale_of_the_matrix(tmp_path: Path) -> None:
    folder = quantised(make_target(tmp_path / "t", num_hidden_layers=1), tmp_path / "q", "tensor")
    whole = load(folder).layers[0].mlp
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    halves = [load(folder, TPGroup(rank, 2)).layers[0].mlp for rank in range(2)]
    torch.testing.assert_close(sum(half.partial(x) for half in halves), whole.partial(x))


def test_scales_of_inputs_that_are_not_used_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where FP8 is multiplied; elsewhere the log says that it is not."""
    monkeypatch.setattr(floats, "fp8_fallback", lambda device: None)
    for name, (settings, has_input_scale) in CONFIGS.items():
        quant = read_quant_method({"quantization_config": settings}, "model x")
        assert quant.fallback(torch.device("cpu")) == (PER_TOKEN if has_input_scale else None), name


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"quant_method": "fp8", "activation_scheme": "other"}, "activation_scheme='other' is not supported"),
        (group("group", "token", True), "weights.strategy='group' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo='W4A8' is not supported; only 'NVFP4', 'FP8'"),
    ],
)
def test_other_scales_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_quant_method({"quantization_config": settings}, "model x")


def test_several_scales_of_a_matrix_do_not_fit(tmp_path: Path) -> None:
    folder = quantised(make_target(tmp_path / "t", num_hidden_layers=1), tmp_path / "q", "tensor")
    tensors = load_file(str(folder / "model.safetensors"))
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(2)
    save_file(tensors, str(folder / "model.safetensors"))
    with pytest.raises(ValueError, match=r"up_proj.weight_scale .*has shape \(2,\), not one scale of the whole matrix"):
        load(folder)


def test_experts_in_16_bits_beside_layers_in_fp8() -> None:
    """As `aerie quantize` leaves a draft module's own; some of an expert's matrices alone are refused."""
    names = [f"model.layers.3.mlp.experts.0.{name}_proj" for name in ("gate", "up", "down")]
    stacked = [("gate", Span.whole(64)), ("up", Span.whole(64))]
    gate_up = LinearShape.stacked(stacked, Span.whole(128))
    down = LinearShape.stacked([("down", Span.whole(128))], Span.whole(64))
    shape = ExpertsShape(Span.whole(2), gate_up, down)
    quant = FloatQuant(block_scheme((128, 128)), ("model.layers.3.mlp.experts",))
    assert isinstance(quant.experts_method(names, shape), UnquantizedExperts)
    with pytest.raises(ValueError, match="only"):
        FloatQuant(block_scheme((128, 128)), (names[0],)).experts_method(names, shape)
