"""The examples run as they are written."""

import ast
import inspect
import json
import runpy
from typing import Any

import pytest
import torch

from tests.support import ROOT

EXAMPLES = ROOT / "examples"


def test_offline_example_answers(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "offline.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "How can I help you" in said and "pens" in said
    assert said.count("a round)") == 2


async def test_notebook_runs_in_a_running_event_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """Cell by cell with top-level await, as a kernel does, without one: kernels need 60 MB more to install."""
    torch.set_num_threads(1)
    names: dict[str, Any] = {}
    for cell in json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]:
        assert not any(output["output_type"] == "error" for output in cell.get("outputs", []))
        if cell["cell_type"] == "code":
            code = compile("".join(cell["source"]), cell["id"], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            found = eval(code, names)
            if inspect.iscoroutine(found):
                await found
    said = capsys.readouterr().out
    assert "How can I help you" in said and "pens" in said and said.count(" a round") == 2
    assert "'multiply'" in said and "vllm:spec_decode_num_accepted_tokens" in said and said.count("|") > 3
