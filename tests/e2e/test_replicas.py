"""Two engines behind one ingress: who gets a request, one that dies, an update under load. The ranks are scripted."""

import concurrent.futures
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import Server, actor_pids, engine_stats, serving
from tests.support.scripted import scripted_token

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]

NUM_TOKENS = 60  # of an answer: a fifth of a second


def _args(**engine: Any) -> dict[str, Any]:
    return {
        "model": {"path": "target", "device": "cpu"},
        "parallel": {"tensor_parallel": 1, "replicas": 2},
        "scheduler": {"max_running": 8, "max_waiting": 24},
        "ingress": {"num_replicas": 1},
        "engine": engine,
    }


@pytest.fixture(scope="module")
def server(ray_port: int, folder: Path) -> Iterator[Server]:
    with serving(ray_port, _args(), folder, scripted=True) as running:
        _wait_for_engines(2)
        time.sleep(1.5)  # until the ingress has found both
        yield running


def _ask(server: Server, prompt: list[int], seed: int = 0) -> tuple[int, list[int]]:
    """Status and tokens."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "seed": seed,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    tokens: list[int] = answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else []
    return answer.status_code, tokens


def _expected(prompt: list[int], seed: int) -> tuple[int, list[int]]:
    return 200, [scripted_token(seed, position) for position in range(len(prompt), len(prompt) + NUM_TOKENS)]


def test_prompts_of_one_beginning_go_to_one_engine_and_others_to_both(server: Server) -> None:
    before = {stats.engine_id: stats for stats in engine_stats()}
    shared = [5 + index % 50 for index in range(300)]
    for last in range(8):
        assert _ask(server, [*shared, last + 5])[0] == 200
    after = {stats.engine_id: stats for stats in engine_stats()}
    assert sorted(after[name].prefix_queries - before[name].prefix_queries for name in before) == [0, 8 * 301]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda first: _ask(server, [first + 5] * 100), range(16)))
    for stats in engine_stats():
        assert stats.prefix_queries - after[stats.engine_id].prefix_queries >= 400, "each has a few of them"


class Load:
    """Clients that ask again and again until the `with` ends; wrong: answers that were not as they should be."""

    def __init__(self, server: Server, num_clients: int = 4) -> None:
        self._server = server
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(num_clients)]
        self.num_right = 0
        self.wrong: list[object] = []

    def _run(self, number: int) -> None:
        prompt = [5 + number] * 20
        while not self._over.is_set():
            answer = _ask(self._server, prompt, seed=number)
            if answer == _expected(prompt, number):
                self.num_right += 1
            else:
                self.wrong.append(answer)

    def wait(self, count: int) -> None:
        """Until so many more answers have come."""
        wanted, deadline = self.num_right + count, time.monotonic() + 60
        while self.num_right < wanted and not self.wrong:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("victim", ["EagleCoordinator", "ServeReplica:aerie:Engine"])
def test_one_of_two_engines_dies_and_no_request_fails(server: Server, victim: str) -> None:
    with Load(server) as load:
        load.wait(8)
        os.kill(actor_pids(victim)[0], signal.SIGKILL)
        load.wait(40)
    assert not load.wrong
    server.wait_healthy()
    _wait_for_engines(2)


def _update(args: dict[str, Any], folder: Path) -> None:
    from ray import serve

    from aerie.deploy.app import application
    from aerie.deploy.checks import planned
    from aerie.deploy.nodes import cluster_nodes
    from tests.e2e.scripted_rank import ScriptedEngine

    serve.run(application(planned(args, cluster_nodes(), folder), ScriptedEngine), name="aerie", route_prefix="/")


def test_an_update_replaces_both_engines_and_no_request_fails(server: Server, folder: Path) -> None:
    before = {stats.engine_id for stats in engine_stats()}
    with Load(server) as load:
        load.wait(8)
        _update(_args(queue_timeout_s=200.0), folder)
        load.wait(20)
    assert not load.wrong
    after = {stats.engine_id for stats in engine_stats() if stats.status == "ready"}
    assert len(after) == 2 and not after & before


def test_an_engine_comes_with_the_load_and_drains_when_it_is_gone(server: Server, folder: Path) -> None:
    replicas = {"min": 1, "max": 2, "up_after_s": 1.0, "down_after_s": 4.0}
    args = _args() | {"parallel": {"replicas": replicas}, "scheduler": {"max_running": 4, "max_waiting": 24}}
    _update(args, folder)
    _wait_for_engines(1)
    with Load(server, 6) as load:
        _wait_for_engines(2)
        load.wait(40)
    with Load(server, 1) as light:
        _wait_for_engines(1)
        light.wait(5)
    assert not load.wrong and not light.wrong


def _wait_for_engines(count: int) -> None:
    deadline = time.monotonic() + 90
    while len(stats := engine_stats()) != count or any(each.status != "ready" for each in stats):
        assert time.monotonic() < deadline, stats
        time.sleep(0.2)
