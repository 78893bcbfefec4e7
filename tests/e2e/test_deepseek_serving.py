"""The whole path with a tiny random target of DeepSeek-V3's shape (latent attention, experts, block-scaled FP8 weights)
and its own module for multi-token prediction, on one rank and on two, chain and tree, from HTTP to ranks and back."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.checkpoint import VOCAB, make_tokenizer
from tests.e2e.serving import Server, serving, wait_idle
from tests.support.tiny_models import add_mtp, make_target
from tests.workers.layers.test_block_fp8 import quantised

# Ray leaves sockets and subprocesses to the garbage collector when it is shut down in the process that started it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
CHAIN = {"num_steps": 3, "top_k": 1, "num_draft_tokens": 4, "adaptive": False}
TREE = {"num_steps": 4, "top_k": 3, "num_draft_tokens": 10, "adaptive": False}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "seed": 7, "frequency_penalty": 0.3},
]


def answered(server: Server, **parameters: Any) -> tuple[str, int]:
    """The text, and how many rounds had drafts."""
    body = {"model": server.model, "prompt": "once upon a time", "max_tokens": 40} | parameters
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    speculation = (reply.get("metrics") or {}).get("speculative_decoding") or {}
    return reply["choices"][0]["text"], speculation.get("num_spec_steps", 0)


@pytest.mark.timeout(400)
def test_its_module_changes_no_answer(ray_port: int, tmp_path: Path) -> None:
    """Greedy and sampled, against the same server without speculation and against each other."""
    source = make_target(tmp_path / "source", calm=0.01, architecture="DeepseekV3", vocab_size=VOCAB)
    add_mtp(source, copying=True)
    target = quantised(source, tmp_path / "target")
    make_tokenizer(target)
    texts = []
    for ranks, shape in ((1, CHAIN), (2, TREE)):
        args: dict[str, Any] = {
            "model": {"path": str(target), "device": "cpu"},
            "speculative": {"method": "mtp", **shape},
            "cache": {"num_pages": 400},
            "scheduler": {"max_running": 4},
            "parallel": {"tensor_parallel": ranks},
            "engine": {"debug": True},
        }
        with serving(ray_port, args, tmp_path) as server:
            for sampling in SAMPLING:
                (plain, none), (drafted, some) = (
                    answered(server, speculative=speculative, **sampling) for speculative in (False, True)
                )
                assert plain == drafted and none == 0 and some > 0
                texts.append(drafted)
            wait_idle()
    assert texts[: len(SAMPLING)] == texts[len(SAMPLING) :] and len(set(texts)) == len(SAMPLING)
