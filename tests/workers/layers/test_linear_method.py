"""The seam of quantised weights, by the example of docs/add-a-quantisation.md: a method creates its parameters, cuts
and loads them, fills dummies, finishes and multiplies, and no layer knows of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.models.decoder import Decoder
from aerie.workers.models.loading import load_target, read_target_config
from aerie.workers.quantization.table import QUANT_METHODS
from tests.support.repository.pages import page_code
from tests.support.tiny_models import make_target
from tests.workers.models.test_targets import check_greedy

CPU = torch.device("cpu")
read_int8 = page_code("add-a-quantisation.md").read_int8
WHOLE = 1 << 30  # columns of a block that is as long as its row


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUANT_METHODS, "int8", read_int8)


def quantised(source: Path, folder: Path, block: tuple[int, int], ignore: Sequence[str] = ("lm_head",)) -> Path:
    """Two checkpoints of one model: int8 with its scales in `folder`, and in folder / "plain" what those mean."""
    tensors, plain = load_file(str(source / "model.safetensors")), {}
    for name, weight in list(tensors.items()):
        plain[name] = weight
        if name.endswith("_proj.weight") and name.removesuffix(".weight") not in ignore:
            rows, columns = (min(size, extent) for size, extent in zip(block, weight.shape, strict=True))
            tiles = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
            scale = tiles.abs().amax((1, 3), keepdim=True) / 127
            whole = (tiles / scale).round()
            tensors[name] = whole.to(torch.int8).flatten(2, 3).flatten(0, 1).contiguous()
            tensors[name.replace("weight", "weight_scale")] = scale.squeeze(3).squeeze(1).contiguous()
            plain[name] = (whole * scale).flatten(2, 3).flatten(0, 1).contiguous()
    config = json.loads((source / "config.json").read_text())
    quantization = {"quant_method": "int8", "block": block, "ignore": list(ignore)}
    for path, kept, settings in (
        (folder, tensors, config | {"quantization_config": quantization}),
        (folder / "plain", plain, config),
    ):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(settings))
        save_file(kept, str(path / "model.safetensors"), metadata={"format": "pt"})
    return folder


def load(folder: Path, group: TPGroup = SOLO, **settings: Any) -> Decoder:
    source = ModelSource(path=str(folder), device="cpu", **settings)
    return load_target(source, read_target_config(source, group.size), group, CPU, 64)


@pytest.mark.parametrize("block", [(1, WHOLE), (8, 16)], ids=["by row", "by block"])
def test_a_quantised_target_answers_as_its_weights_say(tmp_path: Path, block: tuple[int, int]) -> None:
    target = quantised(make_target(tmp_path / "t", num_hidden_layers=2, attention_bias=True), tmp_path / "q", block)
    check_greedy(target, like=target / "plain")


@pytest.mark.parametrize("block", [(1, WHOLE), (8, 16)], ids=["by row", "by block"])
def test_shards_of_quantised_layers_are_the_layer(tmp_path: Path, block: tuple[int, int]) -> None:
    folder = quantised(make_target(tmp_path / "t", num_hidden_layers=1), tmp_path / "q", block)
    whole = load(folder / "plain").layers[0]
    shards = [load(folder, TPGroup(rank, 2)).layers[0] for rank in range(2)]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    # float32 sums of up to 96 numbers in another order
    torch.testing.assert_close(sum(shard.mlp.partial(x) for shard in shards), whole.mlp.partial(x))
    torch.testing.assert_close(
        sum(shard.self_attn.o_proj.partial(half) for shard, half in zip(shards, x.chunk(2, 1), strict=True)),
        whole.self_attn.o_proj(x),
    )
    outputs = [shard.self_attn.qkv(x).split((32, 16, 16), 1) for shard in shards]
    together = torch.cat([part for parts in zip(*outputs, strict=True) for part in parts], 1)
    torch.testing.assert_close(together, whole.self_attn.qkv(x))


def test_parameters_keep_their_own_types(tmp_path: Path) -> None:
    folder = quantised(make_target(tmp_path / "t", num_hidden_layers=1), tmp_path / "q", (1, WHOLE))
    model = load(folder, dtype="bfloat16")
    types = {name.rpartition("layers.0.")[2]: p.dtype for name, p in model.named_parameters()}
    assert types["self_attn.qkv.method.weight"] == torch.int8
    assert types["self_attn.qkv.method.weight_scale"] == torch.float32
    assert types["input_layernorm.weight"] == types["lm_head.method.weight"] == torch.bfloat16
    assert model.layers[0].mlp.gate_up.method.dtype == torch.bfloat16 and torch.get_default_dtype() == torch.float32


def test_dummies_are_the_methods_own(tmp_path: Path) -> None:
    folder = quantised(make_target(tmp_path / "t", num_hidden_layers=1), tmp_path / "q", (1, WHOLE))
    (folder / "model.safetensors").unlink()
    layer = load(folder, load_format="dummy").layers[0]
    weight = layer.mlp.down_proj.method.weight
    assert weight.dtype == torch.int8 and weight.unique().numel() > 200
    assert torch.isfinite(layer.mlp(torch.ones(2, 64))).all()


@pytest.mark.parametrize(
    "name,tensor,message",
    [
        ("self_attn.q_proj.weight_scale", None, "missing: model.layers.0.self_attn.q_proj.weight_scale$"),
        (
            "mlp.up_proj.weight",
            torch.zeros(96, 64),
            r"mlp.up_proj.weight \(model.safetensors\) is torch.float32, not",
        ),
        (
            "mlp.up_proj.weight_scale",
            torch.zeros(95, 1),
            r"up_proj.weight_scale \(.*\) has shape \(95, 1\), .*\(96, 1\)$",
        ),
        (
            "mlp.up_proj.zero_point",
            torch.zeros(1),
            r"unexpected: model.layers.0.mlp.up_proj.zero_point \(.*\)$",
        ),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path: Path, name: str, tensor: Tensor | None, message: str) -> None:
    folder = quantised(make_target(tmp_path / "t", num_hidden_layers=1), tmp_path / "q", (1, WHOLE))
    tensors: dict[str, Any] = load_file(str(folder / "model.safetensors")) | {f"model.layers.0.{name}": tensor}
    save_file({k: v for k, v in tensors.items() if v is not None}, str(folder / "model.safetensors"))
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_what_a_method_cannot_hold_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", num_hidden_layers=1)
    with pytest.raises(ValueError, match="int8: 48 rows of gate_proj cut a block of 32"):
        load(quantised(target, tmp_path / "q", (32, 32)), TPGroup(0, 2))
    ignore = ("lm_head", "model.layers.0.mlp.up_proj")
    with pytest.raises(ValueError, match="only model.layers.0.mlp.up_proj are left unquantised"):
        load(quantised(target, tmp_path / "r", (1, WHOLE), ignore))


def test_gguf_without_the_types_of_its_weights_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = quantised(make_target(tmp_path / "t", num_hidden_layers=1), tmp_path / "q", (1, WHOLE))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "gguf"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quant_method='gguf' without the types of its weights; serve the .gguf file"):
        load(folder)


def test_an_unknown_quantisation_names_those_that_exist(tmp_path: Path) -> None:
    folder = quantised(make_target(tmp_path / "t", num_hidden_layers=1), tmp_path / "q", (1, WHOLE))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "quip"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError,
        match="quant_method='quip' is not supported; supported: auto-round, awq, .*, int8, .*; use the checkpoint in",
    ):
        load(folder)
