"""A start asks Triton for every kernel that serving needs: later each would be compiled while everybody waits."""

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed here")

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@pytest.mark.parametrize(
    "model,shape,options",
    [
        # few rows in the largest step, and few captures: what the slow cases have
        (
            "llama-3.1-8b",
            "plain",
            ("--steps", "8", "--max-running", "16", "--share", "0.05", "--step-tokens", "2048"),
        ),
        pytest.param(
            "llama-3.1-8b", "plain", ("--steps", "8", "--max-running", "48", "--share", "0.05"), marks=pytest.mark.slow
        ),
        pytest.param(
            "dsv3-rank", "chain", ("--steps", "8", "--max-running", "48", "--share", "0.2"), marks=pytest.mark.slow
        ),
        pytest.param(
            "dsv3-rank", "chain", ("--steps", "12", "--max-running", "8", "--share", "0.05"), marks=pytest.mark.slow
        ),
        pytest.param("dsv3-rank", "chain", (), marks=pytest.mark.slow),
        pytest.param("dsv3-rank", "tree", (), marks=pytest.mark.slow),
        pytest.param("qwen3.5-27b", "tree", (), marks=pytest.mark.slow),
        pytest.param("qwen3.5-35b-a3b", "chain", (), marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", "chain", (), marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", "tree", (), marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", "tree", ("--deterministic",), marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", "plain", (), marks=pytest.mark.slow),
    ],
)
def test_no_step_needs_a_kernel_that_the_start_did_not(model: str, shape: str, options: tuple[str, ...]) -> None:
    """Whatever the number of rows: it decides which addresses and strides are multiples of 16, and tiles. Nor does a
    capture that comes later."""
    command = [sys.executable, "-m", "tests.support.kernels.census", model, shape, *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout)
    assert found["start"] > 30 and found["late"] == []


@pytest.mark.parametrize("size", [2048, 4096, 151936])
def test_the_best_tokens_of_any_number_of_rows_are_found_by_one_kernel(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles a kernel again for an address that is no multiple of 16, as an odd number of rows gave it."""
    import torch

    from aerie.kernels.vocabulary import topk_log_softmax_triton as topk

    seen: set[tuple[bool, ...]] = set()

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **_: seen.add(
                tuple(x.data_ptr() % 16 == 0 for x in arguments if isinstance(x, torch.Tensor))
            )

    for name in ("_partial", "_combine"):
        monkeypatch.setattr(topk, name, Launch())
    for rows in (1, 2, 3, 4, 6, 7):
        topk.topk_log_softmax(torch.zeros((rows, size), dtype=torch.bfloat16), 4)
    assert all(all(aligned) for aligned in seen)
