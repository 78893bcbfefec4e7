"""The page's scripts that need no browser, in Node: one file of `logic` for some of them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

LOGIC = Path(__file__).parent / "logic"


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node")
def test_logic(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "cluster" / "http" / "page", tmp_path / "page")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    files = [shutil.copy(file, tmp_path) for file in sorted(LOGIC.glob("*.mjs"))]
    done = subprocess.run(["node", "--test", *files], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(files) == 4
