"""The examples run as they are written."""

import runpy

import pytest

from tests.support import ROOT

EXAMPLES = ROOT / "examples"


def test_offline_example_answers(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "offline.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "How can I help you" in said and "pens" in said
    assert said.count("a round)") == 2
