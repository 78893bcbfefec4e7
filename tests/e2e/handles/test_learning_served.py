"""A served draft that learns: from poor weights to a published version, beside requests whose answers stay."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import ray

from aerie.cluster.learning.gate import Candidate
from aerie.cluster.transport.discovery import find_coordinators
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
LIMIT_S = 400.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def server(ray_port: int, folder: Path) -> Iterator[Server]:
    target = make_target(folder / "target", vocab_size=VOCAB, num_hidden_layers=8, calm=0.01)  # such can be learned
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
        "parallel": {"tensor_parallel": 1},
        "learning": {"min_texts": 8, "held_out": 0.3, "learning_rate": 3e-3, "steps": 60, "priority": "normal"},
        "ingress": {"api_keys": [{"name": "root", "key": "r" * 20, "admin": True}]},
    }
    with serving(ray_port, args, folder) as running:
        yield running


def answers(server: Server, first: int, count: int, headers: dict[str, str] | None = None) -> tuple[list[Any], float]:
    """The tokens of seeded answers, and the tokens of a round."""

    def ask(number: int) -> dict[str, Any]:
        body = {
            "model": server.model,
            "prompt": f"{WORDS[number % 8]} {WORDS[number // 8 % 8]} {number}",
            "max_tokens": 24,
            "temperature": 0.5 * (number % 2),
            "seed": number,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        sent = httpx.post(f"{server.url}/v1/completions", json=body, headers={**ROOT, **(headers or {})}, timeout=120)
        reply: dict[str, Any] = sent.raise_for_status().json()
        return reply

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, range(first, first + count)))
    lengths = [reply["metrics"]["speculative_decoding"]["mean_acceptance_length"] for reply in replies]
    return [reply["choices"][0]["token_ids"] for reply in replies], sum(lengths) / count


def drafts(server: Server) -> list[dict[str, Any]]:
    (found,) = httpx.get(f"{server.url}/draft/versions", headers=ROOT, timeout=30).json()["engines"].values()
    return list(found)


def metric(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", headers=ROOT, timeout=30).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_acceptance_rises_answers_stay_and_an_administrator_goes_back(server: Server) -> None:
    frozen, before = answers(server, 0, 16, {"x-aerie-no-learn": "1"})
    assert [each["version"] for each in drafts(server)] == ["0"] and metric(server, "aerie:learned_texts") == 0
    deadline, number = time.monotonic() + LIMIT_S, 1000
    while len(drafts(server)) == 1:
        assert time.monotonic() < deadline, "nothing was published"
        answers(server, number, 8)
        number += 8
    again, after = answers(server, 0, 16, {"x-aerie-no-learn": "1"})
    print(f"tokens a round: {before:.3f}, after {number - 1000} requests {after:.3f}")
    assert again == frozen and after > before
    served = drafts(server)[-1]
    assert served["state"] == "served" and served["gain"] >= served["low"] > 0.005
    assert metric(server, "aerie:draft_version") >= 1 and metric(server, "aerie:dead_drafts") == 0
    back = httpx.post(f"{server.url}/draft/rollback", json={"version": "0"}, headers=ROOT, timeout=30)
    assert back.status_code == 200, back.text
    assert [each["state"] for each in drafts(server) if each["version"] == "0"] == ["served"]
    deadline = time.monotonic() + 10
    while metric(server, "aerie:draft_rollbacks") < 1:  # engines tell the ingress once in a while
        assert time.monotonic() < deadline
        time.sleep(0.2)
    last, length = answers(server, 0, 16, {"x-aerie-no-learn": "1"})
    assert last == frozen and abs(length - before) < 0.02
    refused = httpx.post(f"{server.url}/draft/rollback", json={"version": "99"}, headers=ROOT, timeout=30)
    assert refused.status_code == 409 and "must be one of 0" in refused.text


def test_a_bad_draft_that_is_published_by_force_is_gone_within_a_minute(server: Server, folder: Path) -> None:
    silent = {"x-aerie-no-learn": "1"}
    frozen, before = answers(server, 2000, 64, silent)
    bad = make_block_head(folder / "draft-99", folder / "target", head_for(folder / "target", vocab=VOCAB))
    (coordinator,) = find_coordinators("aerie", {}).values()
    forced = Candidate(1.0, 1.0, 1.0, 1.0, 2.0, 99, str(bad))
    assert ray.get(coordinator.offer_draft.remote(msgspec.msgpack.encode(forced))) == ""
    since_s, states = time.monotonic(), dict[str, str]()
    while states.get("99") != "rolled back":
        assert time.monotonic() < since_s + 60, f"still served: {states}"
        again, _ = answers(server, 2000, 8, silent)
        assert again == frozen[:8]
        states = {each["version"]: each["state"] for each in drafts(server)}
    print(f"gone after {time.monotonic() - since_s:.1f} s")
    last, after = answers(server, 2000, 64, silent)
    assert last == frozen and after == pytest.approx(before, abs=0.02)
