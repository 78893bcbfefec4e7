"""A rank that is killed in an update of weights: requests go on with the weights that they began with, and new ranks
have those of the last update that succeeded. Texts are compared with undisturbed ones."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.checkpoint import VOCAB, make_checkpoints
from tests.e2e.serving import Server, actor_pids, serving
from tests.support.tiny_models import make_target

pytestmark = [
    *(pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
ROOT = {"Authorization": "Bearer " + "r" * 20}
LIMIT_S = 60.0  # process starts on a loaded two-core machine; alone it takes about five seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    make_checkpoints(folder)
    make_target(folder / "other", seed=11, vocab_size=VOCAB, num_hidden_layers=8)
    return folder


@pytest.fixture(scope="module")
def server(ray_port: int, folder: Path) -> Iterator[Server]:
    args: dict[str, Any] = {
        "model": {"path": "target", "device": "cpu", "dtype": "float32"},
        "speculative": {"path": "draft", "num_steps": 3, "num_draft_tokens": 4, "adaptive": False},
        "cache": {"num_pages": 400},
        "scheduler": {"max_running": 8},
        "parallel": {"tensor_parallel": 1},
        "ingress": {"api_keys": [{"name": "root", "key": "r" * 20, "admin": True}]},
    }
    with serving(ray_port, args, folder) as running:
        yield running


def text(server: Server, number: int, count: int = 100) -> tuple[list[int], list[str]]:
    """The tokens of an answer, and the versions of the weights that wrote them."""
    body = {
        "model": server.model,
        "prompt": f"the quick brown fox {number}",
        "max_tokens": count,
        "temperature": 0.7 * (number % 2),
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_weight_versions": True,
    }
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=ROOT, timeout=300)
    choice = reply.raise_for_status().json()["choices"][0]
    return choice["token_ids"], [each["version"] for each in choice["weight_versions"]]


def update(server: Server, folder: Path) -> httpx.Response:
    body = {"update_info": {"path": str(folder)}}
    return httpx.post(f"{server.url}/update_weights", json=body, headers=ROOT, timeout=300)


def restarted_s(server: Server, since_s: float, former: int) -> float:
    """Wait for new ranks that answer, and return the seconds that it took."""
    while actor_pids("WorkerActor") in ([], [former]) or server.health()[0] != 200:
        assert time.monotonic() < since_s + LIMIT_S, server.health()
        time.sleep(0.1)
    return time.monotonic() - since_s


def test_texts_and_versions_are_those_of_the_last_whole_update(server: Server, folder: Path) -> None:
    first = [text(server, number)[0] for number in range(3)]
    assert update(server, folder / "other").status_code == 200
    second = [text(server, number)[0] for number in range(3)]
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert update(server, folder / "target").status_code == 200

    (rank,) = actor_pids("WorkerActor")
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(text, server, number) for number in range(3)]
        time.sleep(0.3)
        os.kill(rank, signal.SIGSTOP)  # so that the update has begun, and no more
        updating = pool.submit(update, server, folder / "other")
        time.sleep(1.0)
        os.kill(rank, signal.SIGKILL)
        took_s = restarted_s(server, time.monotonic(), rank)
        assert updating.result().status_code in (409, 503)
        assert [each.result() for each in running] == [(tokens, ["2"]) for tokens in first]
    print(f"served again after {took_s:.1f} s")
    assert [text(server, number) for number in range(3)] == [(tokens, ["2"]) for tokens in first]

    assert update(server, folder / "other").status_code == 200
    (rank,) = actor_pids("WorkerActor")
    os.kill(rank, signal.SIGKILL)
    took_s = restarted_s(server, time.monotonic(), rank)
    print(f"served again after {took_s:.1f} s")
    found = [text(server, number) for number in range(3)]
    assert [tokens for tokens, _ in found] == second and len({*(str(versions) for _, versions in found)}) == 1
