"""What published checkpoints of 4 and 8 bits are read as and take, and which are refused. Nothing is allocated."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.deploy.cli import main
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.models.loading import allocate
from aerie.workers.models.registry import family_of
from aerie.workers.models.weights import META, weight_bytes, weight_formats
from aerie.workers.quantization.integers.scheme import SchemeQuant
from aerie.workers.quantization.table import read_quant_method
from tests.support import MODELS
from tests.support.slow import one_of_each
from tests.workers.models.test_published_configs import read
from tests.workers.quantization.published_configs import AUTO_ROUND, AWQ, GPTQMODEL, INT4, PUBLISHED, REFUSED, packed


def planned(raw: dict[str, Any], ranks: int = 1) -> tuple[str, int]:
    config = read(raw)
    family = family_of(config.architecture, "model x")
    model = allocate(
        lambda: family.model(config, TPGroup(0, ranks), 8, META, ()),
        family.weight_names(config),
        config.quant,
        torch.bfloat16,
        META,
    )
    return weight_formats(model), weight_bytes(model, multiplies_fp8=True)


@pytest.mark.parametrize("name", one_of_each({name: formats for name, (_, formats, _) in PUBLISHED.items()}))
def test_published_checkpoints_are_read(name: str) -> None:
    raw, formats, gigabytes = PUBLISHED[name]
    found, num_bytes = planned(raw)
    assert found == formats
    assert num_bytes / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_ranks_share_packed_bytes() -> None:
    """Llama-3.1-70B in AWQ: all bytes but norms; groups of 128 divide a rank's inputs."""
    raw, _, _ = PUBLISHED["hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4"]
    whole, share = planned(raw)[1], planned(raw, 8)[1]
    norms = 2 * 8192 * (2 * 80 + 1)
    assert share == (whole - norms) // 8 + norms


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_ignored_is_refused(name: str) -> None:
    quantization, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"^model x: quantization_config\.?.*{message}"):
        read_quant_method({"quantization_config": quantization}, "model x")


def scheme_of(quantization: dict[str, Any], name: str) -> str:
    quant = read_quant_method({"quantization_config": quantization}, "model x")
    assert isinstance(quant, SchemeQuant)
    return str(quant.scheme_of(name))


def test_rules_choose_the_scheme_of_a_module() -> None:
    q, up, head = "model.layers.3.self_attn.q_proj", "model.layers.12.mlp.up_proj", "lm_head"
    dynamic = {"-:.*self_attn": {}, r"+:.*\.1[0-9]\..*": {"bits": 8, "group_size": 64}, "lm_head": {"bits": 8}}
    rules = GPTQMODEL | {"dynamic": dynamic}
    assert [scheme_of(rules, name) for name in (q, up, head)] == [
        "None",
        "int8 in groups of 64",
        "int8 in groups of 128",
    ]
    some = GPTQMODEL | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]], "lm_head": True}
    assert [scheme_of(some, name) for name in (q, up, head)] == [INT4, "None", INT4]
    extra = {"extra_config": {q: {"bits": 8}, r".*mlp\.up.*": {"bits": 16}, "lm_head": {"bits": 4, "group_size": 32}}}
    assert [scheme_of(AUTO_ROUND | extra, name) for name in (q, up, head)] == [
        "int8 in groups of 128",
        "None",
        "int4 in groups of 32",
    ]
    assert scheme_of(AUTO_ROUND, "mtp.layers.0.mlp.up_proj") == "None"
    left = AWQ | {"modules_to_not_convert": ["layers.3.", "up_proj", "gate"]}
    assert [scheme_of(left, name) for name in (q, up, head)] == ["None", "None", "None"]
    assert scheme_of(left, "model.layers.4.mlp.gate_proj") == INT4
    groups = packed(["re:.*layers.12.*"])
    groups["config_groups"]["group_1"] = packed([], [q], num_bits=8)["config_groups"]["group_0"]
    assert [scheme_of(groups, name) for name in (q, up, head)] == ["int8 in groups of 128", "None", INT4]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B-AWQ", "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16"])
def test_aerie_plan_says_what_is_served_how(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plan_folder(tmp_path, PUBLISHED[name][0])
    kernel = ["--quantization", "awq_marlin"] if "AWQ" in name else []  # as users of vLLM have it
    command = ["plan", str(folder), "--cpus", "8", "--gpus", "1", "--set", "model.load_format=dummy"]
    assert main([*command, *kernel]) == 0
    printed = capsys.readouterr().out
    assert f"formats     {PUBLISHED[name][1]}" in printed


def test_aerie_plan_refuses_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plan_folder(tmp_path, PUBLISHED["Qwen/Qwen3-8B-AWQ"][0] | {"quantization_config": REFUSED["marlin"][0]})
    assert main(["plan", str(folder), "--cpus", "8", "--gpus", "1", "--set", "model.load_format=dummy"]) == 2
    assert "checkpoint_format='marlin' is not supported" in capsys.readouterr().err


def plan_folder(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    for file in (MODELS / "target").glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
