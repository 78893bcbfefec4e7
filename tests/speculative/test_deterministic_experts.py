"""`test_deterministic_interpreted` with experts, latent attention and recurrent layers, in a process of its own for the
time that it takes."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed here")

from tests.speculative.test_deterministic_interpreted import answers, as_on_a_gpu, wide_pair  # noqa: E402, F401
from tests.support.kernels.triton_interpreter import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="tests/speculative/gpu/test_gpu_deterministic.py does it on GPUs"
)


LATENT = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}


@pytest.mark.parametrize(
    "experts",
    [
        {"architecture": "Qwen3Moe", "moe_intermediate_size": 128, "num_experts": 4},
        {"architecture": "GptOss", "intermediate_size": 72, "num_local_experts": 4, "attention_bias": False},
        {"architecture": "DeepseekV3", "moe_intermediate_size": 128, **LATENT},
    ],
    ids=["Qwen3", "gpt-oss", "V3"],
)
def test_neither_speculation_nor_company_changes_a_token(tmp_path: Path, experts: dict[str, object]) -> None:
    """In their kernels for many rows, which take a second for each pass here."""
    pair = wide_pair(tmp_path, (3, 21), calm=0.02, num_hidden_layers=1, **experts)
    assert answers(pair, pair.tree(), 2, 16) == answers(pair, None, 1, 512)


def test_neither_does_it_with_recurrent_layers(tmp_path: Path) -> None:
    """Prompts whole and in chunks, decoded and verified tokens."""
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_value_heads": 4}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    pair = wide_pair(tmp_path, (3, 21), calm=0.003, architecture="Qwen3_5", **sizes, **layers)
    assert answers(pair, pair.tree(), 2, 16) == answers(pair, None, 1, 512)
