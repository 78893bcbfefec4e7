"""gpt-oss against transformers: windows, sinks, experts with biases; checkpoints in MXFP4 and in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.models.gpt_oss import GptOssConfig
from aerie.workers.models.loading import load_target, read_target_config
from tests.support.target_answers import check_chains_and_cached_prefixes, check_trees_on_ranks
from tests.support.tiny_models import make_target
from tests.workers.layers.test_fp4 import quantised_matrix
from tests.workers.models.test_targets import by_transformers, by_us, check_greedy, requests_of

GPT_OSS = {"architecture": "GptOss"}  # of windows of 12 tokens; prompts have up to 90


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, seed: int) -> None:
    target = make_target(tmp_path / "target", seed, **GPT_OSS)
    check_greedy(target)


@pytest.mark.slow  # trees and few pages: `test_window_pool`; ranks: experts, below
def test_trees_ranks_and_few_pages_change_no_token(tmp_path: Path) -> None:
    check_trees_on_ranks(make_target(tmp_path / "target", **GPT_OSS), tmp_path / "head")


@pytest.mark.slow
def test_chains_and_cached_prefixes_change_no_token(tmp_path: Path) -> None:
    check_chains_and_cached_prefixes(make_target(tmp_path / "target", **GPT_OSS), tmp_path / "head")


def mxfp4(source: Path, folder: Path) -> Path:
    """Two checkpoints of one model: its experts in MXFP4 in `folder`, and in folder / "plain" what those mean."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, stacked in load_file(str(source / "model.safetensors")).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = plain[name] = stacked
            continue
        each = [quantised_matrix(matrix.T, "mxfp4") for matrix in stacked]
        plain[name] = torch.stack([meaning.T for _, meaning in each]).contiguous()
        blocks = torch.stack([kinds["weight_packed"] for kinds, _ in each])
        tensors[f"{name}_blocks"] = blocks.unflatten(2, (-1, 16)).contiguous()
        tensors[f"{name}_scales"] = torch.stack([kinds["weight_scale"] for kinds, _ in each])
    config = json.loads((source / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": left}}
    for path, kept, added in ((folder, tensors, quantization), (folder / "plain", plain, {})):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config | added))
        save_file(kept, str(path / "model.safetensors"), metadata={"format": "pt"})
    return folder


def test_experts_in_mxfp4_answer_as_they_mean(tmp_path: Path) -> None:
    """An expert of 96 is three blocks, which two ranks cut in the middle."""
    folder = mxfp4(make_target(tmp_path / "t", **GPT_OSS), tmp_path / "q")
    found = by_us(folder)
    assert by_us(folder, 2) == found == by_transformers(folder / "plain", found)


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["plain", ""])
def test_ranks_may_hold_whole_experts(tmp_path: Path, kept: str) -> None:
    folder = mxfp4(make_target(tmp_path / "t", **GPT_OSS), tmp_path / "q")
    found = requests_of(folder / kept, 2, expert_parallel=True)
    outputs = [request.output for request in found]
    assert outputs == by_transformers(folder / "plain", outputs)


def config_of(folder: Path, **changes: Any) -> GptOssConfig:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    config = read_target_config(ModelSource(path=str(folder)), changes.get("tp", 1))
    assert isinstance(config, GptOssConfig)
    return config


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types: must be 4 .* times 'full_attention' or 'sliding"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types: must be 4"),
        ({"sliding_window": None}, "lacks 'sliding_window'"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7: must be 1 to the 6 experts"),
        ({"num_local_experts": None}, "lacks 'num_experts'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"tp": 4, "intermediate_size": 90}, r"tensor_parallel=4: .*intermediate_size=90\); try one of \[1, 2\]"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method='bitsandbytes' is not supported"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(make_target(tmp_path / "t", **GPT_OSS), **changes)


def test_a_config_that_says_little_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers import GptOssConfig as Theirs

    folder = make_target(tmp_path / "t", **GPT_OSS)
    raw = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "layer_types", "head_dim", "attention_bias", "num_experts_per_tok"):
        raw.pop(name, None)
    (folder / "config.json").write_text(json.dumps(raw))
    ours, theirs = config_of(folder), Theirs.from_pretrained(folder)
    assert ours.rope.kind == theirs.rope_parameters["rope_type"] and ours.rope.theta == 150000.0
    assert ours.rope.factor == theirs.rope_parameters["factor"] and not ours.rope.truncate
    assert [window is not None for window in ours.windows] == [kind[0] == "s" for kind in theirs.layer_types]
    assert (ours.head_dim, ours.qkv_bias, ours.o_bias) == (
        theirs.head_dim,
        theirs.attention_bias,
        theirs.attention_bias,
    )
    assert ours.experts.routing.experts_per_token == theirs.num_experts_per_tok


def test_missing_experts_are_named_as_the_checkpoint_names_them(tmp_path: Path) -> None:
    folder = mxfp4(make_target(tmp_path / "t", **GPT_OSS), tmp_path / "q")
    for path, name in ((folder, "gate_up_proj_scales"), (folder / "plain", "down_proj")):
        tensors = load_file(str(path / "model.safetensors"))
        del tensors[f"model.layers.2.mlp.experts.{name}"]
        save_file(tensors, str(path / "model.safetensors"))
        source = ModelSource(path=str(path), device="cpu")
        with pytest.raises(ValueError, match=rf"json; missing: model\.layers\.2\.mlp\.experts\.{name}$"):
            load_target(source, read_target_config(source, 1), SOLO, torch.device("cpu"), 64)
