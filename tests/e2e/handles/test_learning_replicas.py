"""Two engines and a draft that learns: it is published to one first, and to the other once it has served there."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.checkpoint import VOCAB, make_tokenizer
from tests.e2e.serving import Server, serving
from tests.support.drafts.block_reference import head_for, make_block_head
from tests.support.tiny_models import make_target

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
ROOT = {"Authorization": "Bearer " + "r" * 20}
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs"]
CANARY_ROUNDS, LIMIT_S = 400, 500.0


@pytest.fixture(scope="module")
def server(ray_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    target = make_target(folder / "target", vocab_size=VOCAB, num_hidden_layers=8, calm=0.01)
    make_tokenizer(target)
    draft = make_block_head(folder / "draft", target, head_for(target, vocab=VOCAB, from_anchor=True), copying=True)
    args: dict[str, Any] = {
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
        "parallel": {"tensor_parallel": 1, "replicas": 2},
        "learning": {
            "min_texts": 8,
            "held_out": 0.3,
            "learning_rate": 3e-3,
            "steps": 60,
            "priority": "normal",
            "canary_rounds": CANARY_ROUNDS,
        },
        "ingress": {"api_keys": [{"name": "root", "key": "r" * 20, "admin": True}]},
    }
    with serving(ray_port, args, folder) as running:
        yield running


def test_the_second_engine_gets_a_draft_that_has_served_on_the_first(server: Server) -> None:
    def ask(number: int) -> list[int]:
        body = {
            "model": server.model,
            "prompt": f"{WORDS[number % 8]} {WORDS[number // 8 % 8]} {number}",
            "max_tokens": 24,
            "temperature": 0.5 * (number % 2),
            "seed": number,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        sent = httpx.post(f"{server.url}/v1/completions", json=body, headers=ROOT, timeout=120).raise_for_status()
        tokens: list[int] = sent.json()["choices"][0]["token_ids"]
        return tokens

    def served() -> dict[str, str]:
        reply = httpx.get(f"{server.url}/draft/versions", headers=ROOT, timeout=60).raise_for_status().json()
        return {
            engine: str(one["version"])
            for engine, drafts in reply["engines"].items()
            for one in drafts
            if one["state"] == "served"
        }

    until_s, number, seen = time.monotonic() + LIMIT_S, 1000, list[dict[str, str]]()
    with ThreadPoolExecutor(8) as pool:
        frozen = list(pool.map(ask, range(16)))
        while not seen or "0" in seen[-1].values():
            assert time.monotonic() < until_s, f"not published to both: {seen}"
            list(pool.map(ask, range(number, number + 16)))
            number += 16
            seen += [now for now in [served()] if len(now) == 2]
        again = list(pool.map(ask, range(16)))
    alone = [set(versions.values()) for versions in seen if list(versions.values()).count("0") == 1]
    print(seen)
    assert alone, "one engine had it before the other"
    trained = [versions for versions in seen if "0" in versions.values()]
    learned = {engine for versions in trained for engine, version in versions.items() if version != "0"}
    assert len(learned) == 1, "one engine trains"
    assert again == frozen
