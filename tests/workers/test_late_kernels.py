"""A start asks Triton for every kernel that serving needs: later each would be compiled while everybody waits."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@pytest.mark.parametrize(
    "model,shape",
    [
        ("dsv3-rank", "chain"),
        pytest.param("dsv3-rank", "tree", marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", "chain", marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", "tree", marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", "plain", marks=pytest.mark.slow),
    ],
)
def test_no_step_needs_a_kernel_that_the_start_did_not(model: str, shape: str) -> None:
    """Whatever the number of rows: it decides which addresses and strides are multiples of 16, and tiles. Nor does a
    capture that comes later."""
    command = [sys.executable, "-m", "tests.support.kernel_census", model, shape]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout)
    assert found["start"] > 30 and found["late"] == []
