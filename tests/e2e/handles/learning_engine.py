"""A server whose draft can learn: a calm target, a block head with poor weights, and seeded requests. For the tests of
`learning` on Ray."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.checkpoint import VOCAB, make_tokenizer
from tests.e2e.serving import Server
from tests.support.drafts.block_reference import head_for, make_block_head
from tests.support.tiny_models import make_target

ROOT = {"Authorization": "Bearer " + "r" * 20}
_WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs"]


def server_args(folder: Path, replicas: int = 1, **learning: Any) -> dict[str, Any]:
    """Make `folder`/target and `folder`/draft; return the application's arguments. learning: further keys of it."""
    target = make_target(folder / "target", vocab_size=VOCAB, num_hidden_layers=8, calm=0.01)  # such can be learned
    make_tokenizer(target)
    draft = make_block_head(folder / "draft", target, head_for(target, vocab=VOCAB, from_anchor=True), copying=True)
    trained = {"min_texts": 8, "held_out": 0.3, "learning_rate": 3e-3, "steps": 60, "priority": "normal"}
    return {
        "model": {"path": str(target), "device": "cpu", "dtype": "float32"},
        "speculative": {
            "path": str(draft),
            "method": "dflash",
            "num_steps": 3,
            "num_draft_tokens": 4,
            "adaptive": False,
        },
        "cache": {"num_pages": 400},
        "scheduler": {"max_running": 8},
        "parallel": {"tensor_parallel": 1, "replicas": replicas},
        "learning": trained | learning,
        "ingress": {"api_keys": [{"name": "root", "key": "r" * 20, "admin": True}]},
    }


def seeded_reply(server: Server, number: int, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """The reply to request `number`; odd ones are sampled."""
    body = {
        "model": server.model,
        "prompt": f"{_WORDS[number % 8]} {_WORDS[number // 8 % 8]} {number}",
        "max_tokens": 24,
        "temperature": 0.5 * (number % 2),
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    sent = httpx.post(f"{server.url}/v1/completions", json=body, headers={**ROOT, **(headers or {})}, timeout=120)
    reply: dict[str, Any] = sent.raise_for_status().json()
    return reply


def answers(server: Server, first: int, count: int, headers: dict[str, str] | None = None) -> tuple[list[Any], float]:
    """The tokens of seeded answers, and the tokens of a round."""
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda number: seeded_reply(server, number, headers), range(first, first + count)))
    lengths = [reply["metrics"]["speculative_decoding"]["mean_acceptance_length"] for reply in replies]
    return [reply["choices"][0]["token_ids"] for reply in replies], sum(lengths) / count


def drafts(server: Server) -> list[dict[str, Any]]:
    (found,) = httpx.get(f"{server.url}/draft/versions", headers=ROOT, timeout=30).json()["engines"].values()
    return list(found)
