"""`aerie plan MODEL` and `serve MODEL`: the file that options amount to."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from aerie.deploy.cli import main
from aerie.deploy.config import model as model_config
from aerie.deploy.config.drafts import draft_method, own_draft
from aerie.speculative.config import SpeculativeConfig
from tests.support import MODELS, ROOT

TARGET, DRAFT = str(MODELS / "target"), str(MODELS / "draft")


def test_a_model_and_options_amount_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "my.yaml"
    options = [
        "--draft",
        DRAFT,
        "--tensor-parallel",
        "2",
        "--set",
        "cache.memory_gb=0.5",
        "--set",
        "deterministic=true",
    ]
    assert main(["plan", TARGET, *options, "--save", str(saved), "--cpus", "8", "--gpus", "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(saved.read_text()) and "1 x 2 ranks on cpu" in printed
    (application,) = yaml.safe_load(saved.read_text())["applications"]
    assert application["args"] == {
        "model": {"path": TARGET},
        "ingress": {"served_model_name": "target"},
        "speculative": {"method": "eagle3", "path": DRAFT},
        "parallel": {"tensor_parallel": 2},
        "cache": {"memory_gb": 0.5},
        "deterministic": True,
    }
    assert main(["plan", str(saved), "--cpus", "8", "--gpus", "0"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([TARGET, "--set", "cache.memory_gb"], "must be KEY=VALUE"),
        ([TARGET, "--set", "cache.memory=1"], "cache.memory: unknown key; did you mean cache.memory_gb?"),
        ([TARGET, "--set", "model.path.x=1"], "path is no section"),
        (["eagle", "--draft", DRAFT], "--draft: only with a model"),
        (["nothing.yaml"], "nothing.yaml: no such file"),
    ],
)
def test_errors_name_the_option_and_the_remedy(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments, "--nodes", "0"]) == 2
    assert message in capsys.readouterr().err


def test_heads_are_told_apart(tmp_path: Path) -> None:
    shutil.copy(MODELS / "draft" / "config.json", tmp_path / "config.json")
    assert draft_method(tmp_path) == "eagle3"
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert draft_method(tmp_path) == "eagle"


TREE = {"method": "mtp", "num_steps": 4, "top_k": 4, "num_draft_tokens": 8}
CHAIN = {"method": "mtp", "num_steps": 3, "top_k": 1, "num_draft_tokens": 4}
DENSE = "Qwen3_5ForConditionalGeneration"


@pytest.mark.parametrize(
    ("architecture", "config", "section"),
    [
        (DENSE, {"text_config": {"mtp_num_hidden_layers": 1}}, TREE),
        ("Qwen3_5MoeForCausalLM", {"mtp_num_hidden_layers": 1, "num_experts": 256}, CHAIN),
        ("Qwen3NextForCausalLM", {"num_experts": 512}, CHAIN),
        ("DeepseekV3ForCausalLM", {"num_nextn_predict_layers": 1, "n_routed_experts": 256}, CHAIN),
        ("DeepseekV3ForCausalLM", {"num_nextn_predict_layers": 0}, None),
        (DENSE, {"text_config": {"mtp_num_hidden_layers": 0}}, None),
        (DENSE, {"text_config": {}}, None),
        ("LlamaForCausalLM", {"num_nextn_predict_layers": 1}, None),
        (DENSE, {"text_config": 3, "mtp_num_hidden_layers": 1}, None),
    ],
)
def test_a_models_own_module_drafts(
    tmp_path: Path, architecture: str, config: dict[str, Any], section: dict[str, Any] | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    assert own_draft(tmp_path) == section


@pytest.mark.parametrize(
    ("names", "found"), [(["mtp.fc.weight", "model.norm.weight"], True), (["model.norm.weight"], False)]
)
@pytest.mark.parametrize("index", [True, False])
def test_a_module_that_a_copy_left_out_does_not(tmp_path: Path, names: list[str], found: bool, index: bool) -> None:
    raw = {"architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file({name: torch.zeros(1) for name in names}, str(tmp_path / "model.safetensors"))
    if index:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "x")}))
    assert (own_draft(tmp_path) is not None) == found


@pytest.mark.parametrize(
    ("options", "speculative"),
    [
        ([], CHAIN),
        (["--set", "speculative=null"], None),
        (["--set", "speculative.adaptive=false"], CHAIN | {"adaptive": False}),
        (["--draft", DRAFT], {"method": "eagle3", "path": DRAFT}),
        (
            ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'],
            {"method": "mtp", "num_steps": 1, "num_draft_tokens": 2},
        ),
        (["--draft", "suffix"], {"method": "suffix"}),
        (["--draft", "ngram", "--set", "speculative.num_steps=7"], {"method": "suffix", "num_steps": 7}),
        (["--speculative-config", '{"method": "suffix"}'], {"method": "suffix"}),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'],
            {"method": "suffix", "num_steps": 4, "num_draft_tokens": 5, "match_min": 3, "match_max": 3},
        ),
    ],
)
def test_options_go_before_a_models_own_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], speculative: dict[str, Any] | None
) -> None:
    monkeypatch.setattr("aerie.deploy.checks.print_plan", lambda path, nodes: 0)
    saved = tmp_path / "my.yaml"
    tiny = str(ROOT / "tests" / "models" / "deepseek_tiny")
    assert main(["plan", tiny, *options, "--save", str(saved), "--nodes", "0"]) == 0
    (application,) = yaml.safe_load(saved.read_text())["applications"]
    assert application["args"]["speculative"] == speculative


@pytest.mark.parametrize(
    ("config", "method", "depth"),
    [
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"block_size": 8}}, "dflash", 7),
        ({"architectures": ["DFlashDraftModel"], "block_size": 10}, "dflash", 9),
        ({"architectures": ["DFlashDraftModel"]}, "dflash", 15),
        ({"architectures": ["Qwen3DSparkModel"], "block_size": 7, "markov_rank": 0}, "dflash", 7),
        ({"architectures": ["Qwen3DSparkModel"], "block_size": 7, "markov_rank": 256}, "dspark", 7),
        ({"speculators_model_type": "dspark", "block_size": 7}, "dspark", 7),
        ({"architectures": ["DFlash2DraftModel"], "dflash_config": {"block_size": 16}}, "dflash2", 15),
        ({"speculators_model_type": "dflash", "draft_vocab_size": 9}, "dflash", 7),
        ({"speculators_model_type": "dflash", "block_size": 6, "sample_from_anchor": True}, "dflash", 6),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3", None),
        ({"draft_vocab_size": 32000}, "eagle3", None),
        ({}, "eagle", None),
    ],
)
def test_a_heads_method_and_block_are_found(
    tmp_path: Path, config: dict[str, Any], method: str, depth: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = model_config.model_args(TARGET, str(tmp_path), None)["speculative"]
    sizes = {} if depth is None else {"num_steps": depth, "top_k": 7, "num_draft_tokens": 63}
    assert args == {"path": str(tmp_path), "method": method} | sizes


@pytest.mark.parametrize("method", ["dflash", "dspark", "dflash2"])
def test_a_block_drafts_tree_has_the_shapes_that_pay_at_every_load(tmp_path: Path, method: str) -> None:
    """Chains for load, narrower trees, and the tree."""
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": method, "block_size": 8}))
    args = model_config.model_args(TARGET, str(tmp_path), None)["speculative"]
    shapes = [shape.name for shape in SpeculativeConfig(**args).shapes.shapes]
    depth = 8 if method == "dspark" else 7
    trees = [f"{depth}/7/{width}" for width in (16, 24, 32, 48, 63)]
    assert shapes == ["plain", "2/1/3", "4/1/5", f"{depth}/1/{depth + 1}", *trees]


@pytest.mark.parametrize(
    ("head", "experts", "expected"),
    [
        ({"architectures": ["DFlash2DraftModel"], "block_size": 16}, "num_experts", (15, 7, 32)),
        ({"speculators_model_type": "dspark", "block_size": 8}, "n_routed_experts", (8, 7, 32)),
        ({"speculators_model_type": "dspark", "block_size": 8}, "num_local_experts", (8, 7, 32)),
        ({"architectures": ["DFlash2DraftModel"], "block_size": 16}, "", (15, 7, 63)),
        ({"architectures": ["DFlash2DraftModel"], "block_size": 24}, "", (23, 7, 63)),
        ({"architectures": ["DFlash2DraftModel"], "block_size": 2}, "", (1, 1, 2)),
        ({"architectures": ["DFlashDraftModel"], "block_size": 16}, "", (15, 7, 63)),
    ],
)
def test_a_block_drafts_a_tree_where_verified_rows_are_cheap(
    tmp_path: Path, head: dict[str, Any], experts: str, expected: tuple[int, int, int]
) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder, config in ((target, {"text_config": {experts: 8}}), (draft, head)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    args = model_config.model_args(str(target), str(draft), None)["speculative"]
    config = SpeculativeConfig(**args)
    assert (config.num_steps, config.top_k, config.num_draft_tokens) == expected
    (target / "config.json").write_text("{")
    assert model_config.model_args(str(target), str(draft), None)  # reported by the check of the configuration
