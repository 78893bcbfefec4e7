"""A bad draft that is published by force: taken back within a minute, and no answer changes. The learner never has
enough texts, so it publishes nothing meanwhile."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import ray

from aerie.cluster.learning.gate import Candidate
from aerie.cluster.transport.discovery import find_coordinators
from tests.e2e.checkpoint import VOCAB
from tests.e2e.handles.learning_engine import answers, drafts, server_args
from tests.e2e.serving import Server, serving
from tests.support.drafts.block_reference import head_for, make_block_head

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
MORE_TEXTS = 100_000  # than the test sends


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def server(ray_port: int, folder: Path) -> Iterator[Server]:
    with serving(ray_port, server_args(folder, min_texts=MORE_TEXTS), folder) as running:
        yield running


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
