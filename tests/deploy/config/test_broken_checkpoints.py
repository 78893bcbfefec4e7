"""Checkpoints that are damaged or do not fit: `aerie plan` refuses them with one line that names file and tensor,
before anything is started. Nothing here reads a weight."""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from aerie.deploy.cli import main
from tests.support import MODELS

Planned = Callable[..., str]
WEIGHTS = "model.safetensors"
HEADS, HIDDEN = 4, 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of one small layer with the embedded pair's tokenizer."""
    folder = tmp_path_factory.mktemp("whole") / "tiny"
    folder.mkdir()
    for file in (MODELS / "target").iterdir():
        if "token" in file.name or file.name in ("chat_template.jinja", "generation_config.json"):
            shutil.copy(file, folder)
    vocab = json.loads((MODELS / "target" / "config.json").read_text())["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "self_attn.q_proj": (16, HIDDEN),
        "self_attn.k_proj": (8, HIDDEN),
        "self_attn.v_proj": (8, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 16),
        "mlp.gate_proj": (24, HIDDEN),
        "mlp.up_proj": (24, HIDDEN),
        "mlp.down_proj": (HIDDEN, 24),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    tensors = {f"model.layers.0.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    tensors |= {"model.embed_tokens.weight": torch.ones(vocab, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, str(folder / WEIGHTS))
    return folder


@pytest.fixture
def planned(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Planned:
    """Return what `aerie plan` refuses checkpoints with, "" where it does not. It is one line."""

    def plan(target: Path, draft: Path | None = None) -> str:
        args: dict[str, Any] = {"model": {"path": str(target)}}
        if draft is not None:
            args["speculative"] = {"method": "eagle3", "path": str(draft)}
        applications = [{"name": "aerie", "import_path": "aerie.deploy.app:build", "args": args}]
        path = tmp_path / "serve.yaml"
        path.write_text(yaml.safe_dump({"applications": applications}))
        capfd.readouterr()
        code = main(["plan", str(path), "--cpus", "8", "--gpus", "0"])
        lines = capfd.readouterr().err.splitlines()
        assert code == (2 if lines else 0) and len(lines) <= 1, lines
        return "".join(lines)

    return plan


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def rewritten(folder: Path, **changes: torch.Tensor | None) -> None:
    """Tensors of the checkpoint replaced, or left out."""
    tensors: dict[str, Any] = load_file(str(folder / WEIGHTS)) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, str(folder / WEIGHTS))


def configured(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_whole_checkpoint_is_planned(planned: Planned, tiny: Path) -> None:
    assert planned(tiny) == ""
    assert planned(MODELS / "target", MODELS / "draft") == ""


def test_a_file_that_is_cut_off_is_named(planned: Planned, copy: Path) -> None:
    content = (copy / WEIGHTS).read_bytes()
    for size in (0, 5, 100, len(content) - 1):
        (copy / WEIGHTS).write_bytes(content[:size])
        line = planned(copy)
        assert line.startswith(f"{copy / WEIGHTS}: is cut off or damaged") and "download it again" in line, line


def test_a_tensor_of_another_shape_is_named_with_both_shapes(planned: Planned, copy: Path) -> None:
    rewritten(copy, **{"model.layers.0.mlp.down_proj.weight": torch.ones(HIDDEN, 23, dtype=torch.bfloat16)})
    line = planned(copy)
    expected = "wrong: model.layers.0.mlp.down_proj.weight (model.safetensors) has shape (16, 23), config.json implies"
    assert f"{expected} (16, 24)" in line, line


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_a_tensor_of_integers_is_no_weight(planned: Planned, copy: Path, name: str) -> None:
    rewritten(copy, **{name: load_file(str(copy / WEIGHTS))[name].view(torch.int16)})
    assert f"wrong: {name} (model.safetensors) is torch.int16" in planned(copy)


def test_a_missing_tensor_and_a_missing_shard_are_named(planned: Planned, copy: Path) -> None:
    names = list(load_file(str(copy / WEIGHTS)))
    index = {"weight_map": dict.fromkeys(names, WEIGHTS) | {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-00002-of-00002.safetensors, named in model.safetensors.index.json" in planned(copy)
    (copy / "model.safetensors.index.json").unlink()
    rewritten(copy, **{"model.norm.weight": None})
    assert "missing: model.norm.weight" in planned(copy)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "\x00\xff"])
def test_a_garbled_index_is_named(planned: Planned, copy: Path, content: str) -> None:
    (copy / "model.safetensors.index.json").write_text(content, encoding="latin-1")
    assert "model.safetensors.index.json: " in planned(copy)


@pytest.mark.parametrize("content", ["", "garbage", "[]", "{}", '{"model": 7}', '{"version": "1.0"}', "\x00\xff" * 9])
def test_a_garbled_tokenizer_is_named(planned: Planned, copy: Path, content: str) -> None:
    (copy / "tokenizer.json").write_text(content, encoding="latin-1")
    line = planned(copy)
    assert f"{copy / 'tokenizer.json'}: is no tokenizer" in line and "download it again" in line, line


def test_a_draft_is_checked_like_a_target(planned: Planned, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(MODELS / "draft", tmp_path / "draft"))
    tensors = load_file(str(draft / WEIGHTS))
    name = next(name for name in tensors if name.endswith("fc.weight"))
    rewritten(draft, **{name: tensors[name][:-1].clone()})
    assert f"{name} (model.safetensors) has shape" in planned(MODELS / "target", draft)
    (draft / WEIGHTS).write_bytes((MODELS / "draft" / WEIGHTS).read_bytes()[:-7])
    assert str(draft / WEIGHTS) in planned(MODELS / "target", draft)
    (draft / WEIGHTS).unlink()
    (draft / "pytorch_model.bin").write_bytes(b"no pickle")
    assert f"{draft / 'pytorch_model.bin'}: cannot be read" in planned(MODELS / "target", draft)


def test_a_folder_without_weights_is_planned_and_not_served(
    planned: Planned, copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from aerie.cluster.config import ConfigError
    from aerie.deploy.checks import checked

    (copy / WEIGHTS).unlink()
    assert planned(copy) == ""
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        checked({"model": {"path": str(copy)}})


SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta")
OTHERS = ("tie_word_embeddings", "eos_token_id", "architectures", "rope_scaling", "quantization_config", "dtype")


@pytest.mark.parametrize("field", SIZES)
def test_a_broken_size_is_named(planned: Planned, copy: Path, field: str) -> None:
    for value in (0, -1, 3, "x", [], {}, 1.5, True, 10**12, 10**400, float("nan"), None):
        configured(copy, **{field: value})
        line = planned(copy)
        assert field in line or "has shape" in line or "missing" in line, line


@pytest.mark.parametrize("field", [*OPTIONAL, *OTHERS])
def test_a_broken_field_gives_one_line(planned: Planned, copy: Path, field: str) -> None:
    """Not every value is wrong for each of these; what is, is told in one line."""
    for value in ("x", -1, 0, [], {}, 10**400, float("nan")):
        configured(copy, **{field: value})
        line = planned(copy)
        assert field in line or field not in OPTIONAL, line


@pytest.mark.parametrize("content", ["", "{", "[1]", "nul", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_a_garbled_config_is_named(planned: Planned, copy: Path, content: str) -> None:
    (copy / "config.json").write_text(content)
    assert str(copy / "config.json") in planned(copy)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["cut", "flip", "drop", "change", "swap"]))
def test_random_damage_never_passes_and_never_breaks_the_plan(
    planned: Planned, tiny: Path, tmp_path_factory: pytest.TempPathFactory, seed: int, kind: str
) -> None:
    """Damage to a header that leaves every tensor as it was (its names' order, a space) is none."""
    chance = random.Random(seed)
    folder = Path(shutil.copytree(tiny, tmp_path_factory.mktemp("fuzz") / "model"))
    path = folder / WEIGHTS
    content = bytearray(path.read_bytes())
    end = 8 + struct.unpack("<Q", content[:8])[0]
    tensors, harmless = load_file(str(path)), False
    if kind == "cut":
        path.write_bytes(content[: chance.randrange(len(content))])
    elif kind == "flip":
        content[chance.randrange(end)] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        harmless = _same_tensors(path, tensors)
    else:
        name = chance.choice(sorted(tensors))
        shape = list(tensors[name].shape)
        if kind == "change":
            shape[chance.randrange(len(shape))] += chance.choice((-1, 1, 7))
        elif kind == "swap":
            shape.append(1)
        rewritten(folder, **{name: None if kind == "drop" else torch.ones(shape, dtype=torch.bfloat16)})
    line = planned(folder)
    assert harmless or "download it again" in line or "does not fit its config.json" in line or "of type" in line, line
    shutil.rmtree(folder)


def _same_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> bool:
    try:
        found = load_file(str(path))
    except Exception:  # whatever the library says of it
        return False
    return found.keys() == tensors.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in tensors.items()
    )
