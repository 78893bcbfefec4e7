"""Faults found by the check process reach the command; nothing else is printed for them."""

import json
import threading
from pathlib import Path

import pytest

from aerie.cluster.config import ConfigError, parse
from aerie.deploy.serve.check_process import CheckProcess, Task
from tests.support import ROOT
from tests.support.embedded import read_config_file


@pytest.mark.slow  # as `aerie serve` does it: `tests.deploy.test_cli`
def test_a_refused_checkpoint_is_told_at_once_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise ImportError('of the folder where the command was started')")
    monkeypatch.chdir(tmp_path)
    args = read_config_file(ROOT / "deploy" / "eagle.yaml")["applications"][0]["args"]
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["StrangeForCausalLM"]}))
    args["model"]["path"] = str(model)
    config = parse(args, tmp_path).model_dump_json()
    lines: list[str] = []
    told, reasons = threading.Event(), []

    def refuse(reason: str) -> None:
        reasons.append(reason)
        told.set()

    check = CheckProcess()
    try:
        check.begin(Task("serve.yaml", config, True, ""), lines.append)
        check.on_refusal(refuse)
        with pytest.raises(ConfigError, match="StrangeForCausalLM"):
            check.checked()
        assert told.wait(10) and "StrangeForCausalLM" in reasons[0]
    finally:
        check.close()
    assert not [line for line in lines if "StrangeForCausalLM" in line or "Traceback" in line]


def test_a_process_of_checks_that_ends_without_an_answer_is_told() -> None:
    check = CheckProcess()
    check.begin(Task("", "", True, ""), lambda line: None)
    check._process.kill()
    with pytest.raises(ConfigError, match="ended with status -9"):
        check.checked()
    check.close()
