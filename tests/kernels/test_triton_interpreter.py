"""Runs the small cases of kernels' tests under Triton's interpreter, which needs a process of its own: whether
kernels are interpreted is decided when they are imported. The imports take seconds: small files share a process."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.support import ROOT

# An engine's answers, and kernels that others have most in common with or that `make test` compiles for Hopper.
SLOW_FILES = (
    "tests/speculative/test_deterministic_interpreted.py",
    "tests/speculative/test_deterministic_experts.py",
    "tests/kernels/products/test_expert_kernels.py",
    "tests/kernels/gemm/test_ordered_experts.py",
    "tests/workers/layers/test_expert_layers.py",
    "tests/kernels/attend/test_fixed_spans.py",
    "tests/kernels/attend/test_fixed_wide_heads.py",
    "tests/workers/layers/test_fp8_layers.py",
    "tests/attention/backends/test_flashinfer_latent.py",
    "tests/attention/backends/test_flashinfer_rounds.py",
    "tests/kernels/products/test_fp8_gemm.py",
    "tests/workers/distributed/test_one_shot_all_reduce.py",
    "tests/workers/sampling/test_sampling_kernels.py",
    "tests/kernels/products/test_packed_product.py",
    "tests/kernels/products/test_skinny_gemm.py",
)
# The quick cases of all these files share one process. The slow cases of each group have a process of their own.
FILES = {
    "operations": (
        "tests/kernels/ops/test_implementations.py",
        "tests/attention/backends/test_flashinfer_plan.py",
        "tests/attention/backends/test_trtllm_latent.py::test_trees_are_their_prefix_and_their_masked_columns",
        "tests/kernels/test_pdl_gpu.py",
        "tests/kernels/delta_rule/test_delta_kernels.py",
        "tests/kernels/delta_rule/test_recurrence.py",
        "tests/kernels/gemm/test_ordered_gemm.py",
        "tests/kernels/lora/test_few_rows.py",
        "tests/kernels/lora/test_adapted_experts.py",
        "tests/kernels/lora/test_exact_lora.py",
        "tests/kernels/lora/test_latent_adapters.py",
    ),
    "attention": (
        "tests/kernels/attend/test_fixed_latents.py",
        "tests/kernels/attend/test_fixed_wide_heads.py::test_contexts_of_one_span_have_a_result",
        "tests/kernels/attend/test_latent_kernels.py",
        "tests/kernels/attend/test_fp8_kernels.py",
        "tests/attention/backends/test_triton_backend.py",
        "tests/attention/backends/test_triton_prefill.py",
        "tests/attention/backends/test_score_rules.py",
        "tests/speculative/test_round_kernels.py",
    ),
}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is interpreted already"),
]


def interpreted(files: Sequence[str], which: str = "not gpu", named: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", which, "-k", named, *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)


def test_small_cases_are_right_on_a_cpu() -> None:
    check(interpreted([file for files in FILES.values() for file in files], "not gpu and not slow"))


@pytest.mark.slow
@pytest.mark.parametrize("files,named", [("operations", "accept_commit"), ("attention", "")])
def test_their_slow_cases_are_right_on_a_cpu(files: str, named: str) -> None:
    """Without the operations' largest cases, which would take minutes each: those run on GPUs."""
    check(interpreted(FILES[files], "not gpu and slow", named))


@pytest.mark.slow
@pytest.mark.parametrize("file", SLOW_FILES)
def test_the_rest_is_right_on_a_cpu(file: str) -> None:
    check(interpreted([file]))


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
