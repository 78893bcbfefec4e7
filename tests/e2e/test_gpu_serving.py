"""The embedded pair on GPUs under real Serve: prompts in chunks beside rounds, with and without speculation, by each
family of attention kernels, on one GPU and several."""

import json
from typing import Any

import pytest

from tests.bench.quality import gsm8k
from tests.e2e.serving import serving, wait_idle
from tests.support import MODELS

pytestmark = [pytest.mark.ray, pytest.mark.gpu, pytest.mark.filterwarnings("ignore::ResourceWarning")]
CHAIN = {"path": "draft", "num_steps": 3, "num_draft_tokens": 4}
TREE = {"path": "draft", "num_steps": 5, "top_k": 2, "num_draft_tokens": 8}
FLASHINFER = {
    "attention": {"prefill": "flashinfer", "decode": "flashinfer"},
    "draft_attention": {"prefill": "flashinfer", "extend": "flashinfer", "decode": "flashinfer"},
}
TRTLLM = {  # has no kernels for prompts, and drafts chains only
    "attention": {"prefill": "triton", "decode": "trtllm"},
    "draft_attention": {"prefill": "triton", "extend": "trtllm", "decode": "trtllm"},
}
MAX_STEP_TOKENS = 256  # a prompt with its eight shots has three times as many


def asked(port: int, args: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what the GSM8K client says of such an engine: every question answered, with and without speculation."""
    args = args | {
        "model": {"path": "target", "device": "cuda", "dtype": "bfloat16"},
        "cache": {"num_pages": 2048},
        "scheduler": {"max_running": 16, "max_step_tokens": MAX_STEP_TOKENS},
    }
    options = ["--num-questions", "24", "--max-tokens", "64", "--parallel", "16", "--compare"]
    with serving(port, args, MODELS) as server:
        code = gsm8k.main(["--url", server.url, *options])
        figures: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        wait_idle()
    print(json.dumps(figures))  # pytest -rP shows it
    assert code == 0, figures
    assert figures["on"]["acceptance_length"] > 1.2 and figures["off"]["acceptance_length"] is None
    return figures


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_prompts_in_chunks_are_answered(
    ray_port: int, shape: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """In bfloat16 two best tokens often tie, so that some answers part."""
    figures = asked(ray_port, {"speculative": shape}, capsys)
    assert figures["equal_share"] >= 0.4, figures["first_unequal"]


def test_deterministic_answers_are_equal(ray_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    figures = asked(ray_port, {"speculative": CHAIN, "deterministic": True}, capsys)
    assert figures["equal_share"] == 1.0, figures["first_unequal"]


@pytest.mark.parametrize(
    ("backends", "shape", "tensor_parallel"),
    [
        pytest.param(FLASHINFER, TREE, 1, id="flashinfer"),
        pytest.param(FLASHINFER, TREE, 2, marks=pytest.mark.gpu(2), id="flashinfer-2"),
        pytest.param(FLASHINFER, TREE, 4, marks=pytest.mark.gpu(4), id="flashinfer-4"),
        pytest.param(TRTLLM, CHAIN, 1, id="trtllm"),
        pytest.param(TRTLLM, CHAIN, 2, marks=pytest.mark.gpu(2), id="trtllm-2"),  # of four, each has two heads: refused
    ],
)
def test_flashinfers_kernels_in_every_phase_they_have(
    ray_port: int,
    backends: dict[str, Any],
    shape: dict[str, Any],
    tensor_parallel: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("flashinfer", reason="the extra aerie-serve[cuda] is not installed")
    args = {"speculative": shape, "parallel": {"tensor_parallel": tensor_parallel}, **backends}
    figures = asked(ray_port, args, capsys)
    assert figures["equal_share"] >= 0.4, figures["first_unequal"]
