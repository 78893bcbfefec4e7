"""Two engines and a draft that learns: it is published to one first, and to the other once it has served there."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.handles.learning_engine import ROOT, seeded_reply, server_args
from tests.e2e.serving import Server, serving

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
CANARY_ROUNDS, LIMIT_S = 400, 500.0


@pytest.fixture(scope="module")
def server(ray_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    args = server_args(folder, replicas=2, canary_rounds=CANARY_ROUNDS)
    with serving(ray_port, args, folder) as running:
        yield running


def test_the_second_engine_gets_a_draft_that_has_served_on_the_first(server: Server) -> None:
    def ask(number: int) -> list[int]:
        tokens: list[int] = seeded_reply(server, number)["choices"][0]["token_ids"]
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
