"""`test_deterministic_interpreted` with experts, latent attention and recurrent layers, in a process of its own for the
time that it takes."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed here")

from aerie.speculative.build import local_engine  # noqa: E402
from aerie.workers.scheduling.plan import SamplingParams  # noqa: E402
from tests.speculative.test_deterministic_interpreted import (  # noqa: E402
    answers,
    as_on_a_gpu,  # noqa: F401
    spec_of,
    wide_pair,
)
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


HYBRID = {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_value_heads": 4}
HYBRID |= {"architecture": "Qwen3_5", "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def test_neither_does_it_with_recurrent_layers(tmp_path: Path) -> None:
    """Prompts whole and in chunks, decoded and verified tokens."""
    pair = wide_pair(tmp_path, (3, 21), calm=0.003, **HYBRID)
    assert answers(pair, pair.tree(), 2, 16) == answers(pair, None, 1, 512)


@pytest.mark.slow
def test_neither_do_cached_states_of_recurrent_layers(tmp_path: Path) -> None:
    """The same requests once more, from cached pages and states, beside rounds of others."""
    pair = wide_pair(tmp_path, (47, 33), calm=0.003, **HYBRID)
    sampling = SamplingParams(4, 1.0, seed=5, logprobs=0)
    with local_engine(spec_of(pair, None, 40)) as engine:
        alone = engine.generate(pair.prompts, sampling, 1)
        cached = engine.generate(pair.prompts, sampling, 2)
    assert all(request.cached_tokens for request in cached) and not any(request.cached_tokens for request in alone)
    assert [list(request.output) for request in cached] == [list(request.output) for request in alone]
