"""A served draft that learns: from poor weights to a published version, beside requests whose answers stay."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.handles.learning_engine import ROOT, answers, drafts, server_args
from tests.e2e.serving import Server, serving

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
LIMIT_S = 400.0


@pytest.fixture(scope="module")
def server(ray_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    with serving(ray_port, server_args(folder), folder) as running:
        yield running


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
    # a candidate of texts that were sent before may be published after the rollback; no further texts follow
    while True:
        assert time.monotonic() < deadline, "drafts are published without new texts"
        back = httpx.post(f"{server.url}/draft/rollback", json={"version": "0"}, headers=ROOT, timeout=30)
        assert back.status_code == 200, back.text
        last, length = answers(server, 0, 16, {"x-aerie-no-learn": "1"})
        assert last == frozen
        if [each["version"] for each in drafts(server) if each["state"] == "served"] == ["0"]:
            break
    assert abs(length - before) < 0.02
    deadline = time.monotonic() + 10
    while metric(server, "aerie:draft_rollbacks") < 1:  # engines tell the ingress once in a while
        assert time.monotonic() < deadline
        time.sleep(0.2)
    refused = httpx.post(f"{server.url}/draft/rollback", json={"version": "99"}, headers=ROOT, timeout=30)
    assert refused.status_code == 409 and "must be one of 0" in refused.text
