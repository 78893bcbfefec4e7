"""Checkpoints that do not fit are refused before anything runs, with both sides and the remedy named."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from aerie.attention.config import CacheConfig
from aerie.speculative.build import EngineSpec, plan_engine
from aerie.speculative.config import SpeculativeConfig
from aerie.workers.config import ModelSource, SchedulerConfig, WorkerConfig
from tests.speculative.conftest import Pair
from tests.support.engine_plans import build_worker
from tests.support.tiny_models import make_eagle3, make_target


def spec_of(target: Path, draft: Path | None = None, method: Any = "eagle3", **settings: Any) -> EngineSpec:
    model = ModelSource(path=str(target), device="cpu", max_model_len=settings.pop("max_model_len", None))
    worker = WorkerConfig(model, CacheConfig(4, num_pages=50), SchedulerConfig(2), **settings)
    return EngineSpec(worker, SpeculativeConfig(str(draft), method) if draft else None)


def edited(source: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a checkpoint whose config.json has other values (None removes a key)."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"architectures": ["UnheardOfForCausalLM"]}, "UnheardOfForCausalLM is not supported.*LlamaForCausalLM"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quant_method='bitsandbytes' is not .*: auto-round, awq, .*; use",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "needs 'original_max_position_embeddings'"),
        ({"rope_parameters": {"rope_type": [1]}}, "^model [^ ]*t: "),
        ({"num_attention_heads": None}, "lacks 'num_attention_heads'"),
    ],
)
def test_targets_with_what_would_be_ignored_are_refused(
    pair: Pair, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_engine(spec_of(edited(pair.target, tmp_path / "t", **changes)))


def test_a_tensor_parallel_size_that_does_not_divide_names_those_that_do(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel=3: does not divide .*try one of \[1, 2, 4\]"):
        plan_engine(spec_of(pair.target, tensor_parallel=3))


def test_a_length_beyond_the_models_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="max_model_len=513: must be 2 to .*=512"):
        plan_engine(spec_of(pair.target, max_model_len=513))


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"hidden_size": 32, "target_hidden_size": 32}, "hidden_size=32, the target .* hidden_size=64"),
        ({"vocab_size": 95}, "vocab_size=95, the target .* vocab_size=96"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}}, "does not have 3 of"),
    ],
)
def test_drafts_of_another_target_are_refused(
    pair: Pair, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_engine(spec_of(pair.target, edited(pair.eagle3, tmp_path / "d", **changes)))


def test_a_head_run_with_the_wrong_method_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="method=eagle: .* is an eagle3 head.*set method: eagle3"):
        plan_engine(spec_of(pair.target, pair.eagle3, "eagle"))
    with pytest.raises(ValueError, match="method=eagle3: .* is an eagle head"):
        plan_engine(spec_of(pair.target, pair.eagle, "eagle3"))


def rewritten(source: Path, folder: Path, drop: str = "", **extra: Any) -> Path:
    """A copy of a checkpoint without the tensor `drop` and with more."""
    folder = edited(source, folder)
    tensors = load_file(str(folder / "model.safetensors"))
    tensors.pop(drop, None)
    save_file(tensors | extra, str(folder / "model.safetensors"))
    return folder


@pytest.mark.parametrize(
    "drop,message",
    [
        ("d2t", "own vocabulary of 40 but no d2t"),
        ("midlayer.mlp.up_proj.weight", "missing: midlayer.mlp.up_proj.weight"),
        ("lm_head.weight", "but no lm_head.weight"),
    ],
)
def test_incomplete_drafts_name_what_they_lack(pair: Pair, tmp_path: Path, drop: str, message: str) -> None:
    spec = spec_of(pair.target, rewritten(pair.eagle3, tmp_path / "d", drop))
    with pytest.raises(ValueError, match=message):
        build_worker(spec, plan_engine(spec))


def test_a_map_outside_the_targets_vocabulary_is_refused(pair: Pair, tmp_path: Path) -> None:
    offsets = load_file(str(pair.eagle3 / "model.safetensors"))["d2t"] + 80
    spec = spec_of(pair.target, rewritten(pair.eagle3, tmp_path / "d", d2t=offsets))
    with pytest.raises(ValueError, match="d2t points outside the target's vocabulary of 96"):
        build_worker(spec, plan_engine(spec))


def test_unknown_and_misshapen_tensors_are_refused(pair: Pair, tmp_path: Path) -> None:
    tensors = load_file(str(pair.target / "model.safetensors"))
    norm = tensors["model.norm.weight"]
    spec = spec_of(rewritten(pair.target, tmp_path / "a", **{"model.layers.0.self_attn.gate.weight": norm}))
    with pytest.raises(ValueError, match="unexpected: model.layers.0.self_attn.gate.weight"):
        build_worker(spec, plan_engine(spec))
    spec = spec_of(rewritten(pair.target, tmp_path / "b", **{"model.norm.weight": norm[:-1].clone()}))
    with pytest.raises(
        ValueError,
        match=r"model.norm.weight \(model.safetensors\) has shape \(63,\), config.json implies \(64,\)",
    ):
        build_worker(spec, plan_engine(spec))


def test_a_missing_shard_is_named(pair: Pair, tmp_path: Path) -> None:
    folder = edited(pair.target, tmp_path / "t")
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    spec = spec_of(folder)
    with pytest.raises(ValueError, match="lacks model-00002-of-00002.safetensors"):
        build_worker(spec, plan_engine(spec))


def test_published_names_of_the_layer_are_known(tmp_path: Path) -> None:
    """Some published EAGLE-3 heads call their layer layers.0."""
    target = make_target(tmp_path / "target")
    draft = make_eagle3(tmp_path / "draft", target)
    tensors = load_file(str(draft / "model.safetensors"))
    save_file({k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}, str(draft / "model.safetensors"))
    spec = spec_of(target, draft)
    build_worker(spec, plan_engine(spec))
