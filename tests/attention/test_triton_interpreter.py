"""Runs the small cases of kernels' tests under Triton's interpreter, which needs a process of its own: whether
kernels are interpreted is decided when they are imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("tests/attention/test_triton_backend.py", "tests/attention/test_fixed_spans.py",
         "tests/speculative/test_deterministic_interpreted.py",
         "tests/speculative/test_round_kernels.py", "tests/speculative/test_draft_kernels.py",
         "tests/workers/test_few_rows.py",
         "tests/workers/test_sampling_kernels.py", "tests/workers/test_push_reduce.py")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is interpreted already")
@pytest.mark.parametrize("file", FILES)
def test_small_cases_are_right_on_a_cpu(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", file]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True,
                          text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
