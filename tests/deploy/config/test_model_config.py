"""`aerie plan MODEL` and `serve MODEL`: the file that options amount to."""

import shutil
from pathlib import Path

import pytest
import yaml

from deploy.cli import main
from deploy.config import model as model_config
from tests.support import MODELS

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
        (["eagle", "--draft", DRAFT], "--draft: only beside a model"),
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
    assert model_config._head_method(tmp_path) == "eagle3"
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert model_config._head_method(tmp_path) == "eagle"
