"""Coding agents through a task of three tool turns: see `tests.clients.agents`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.agent_programs import AGENTS

FOLDER = Path(__file__).parents[2] / "build/agents"  # of the programs, which npm and pip download once


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which("npm") or not shutil.which("unshare"), reason="needs npm and unshare")
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_writes_reads_and_runs(name: str) -> None:
    command = [sys.executable, "-m", "tests.clients.agents", str(FOLDER), name]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
