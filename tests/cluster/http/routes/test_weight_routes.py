"""Routes for weights and pauses: who may use them, what engines are asked, and what comes of their answers."""

from typing import Any

import pytest

from aerie.cluster.http.keys import KeyConfig
from aerie.cluster.transport.messages import AdminCall, AdminOutcome, Inspect, Pause, Resume
from aerie.workers.scheduling.commands.command import Folder, LoadWeights
from tests.support.edge_client import in_process
from tests.support.fake_engine import FakeEngine, says

ROUTES = (
    ("POST", "/pause", None),
    ("POST", "/resume", None),
    ("GET", "/is_paused", None),
    ("POST", "/update_weights", {"update_info": {"path": "/a"}}),
    ("GET", "/weight_info", None),
)
KEYS = (KeyConfig("root", "r" * 20, admin=True), KeyConfig("user", "u" * 20))
ROOT, USER = ({"Authorization": f"Bearer {letter * 20}"} for letter in "ru")


class Asked(FakeEngine):
    """Notes what engines are asked."""

    outcomes: tuple[AdminOutcome, ...] = (AdminOutcome("a", weight_epoch=3), AdminOutcome("b", True, 3))

    async def administer(self, call: AdminCall) -> list[AdminOutcome]:
        asked.append(call)
        return list(self.outcomes)


asked: list[AdminCall] = []


@pytest.fixture(autouse=True)
def forgotten() -> None:
    asked.clear()


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
async def test_only_keys_that_administer_the_server_reach_an_engine(method: str, path: str, body: Any) -> None:
    async with in_process(Asked(says("x"))) as client:
        reply = await client.request(method, path, json=body)
        assert reply.status_code == 403 and "needs an API key" in reply.json()["error"]["message"]
    async with in_process(Asked(says("x")), api_keys=KEYS) as client:
        assert (await client.request(method, path, json=body)).status_code == 401
        assert (await client.request(method, path, json=body, headers=USER)).status_code == 403
        assert not asked
        assert (await client.request(method, path, json=body, headers=ROOT)).status_code == 200
        assert len(asked) == 1


async def test_engines_are_asked_what_the_body_says() -> None:
    async with in_process(Asked(says("x")), api_keys=KEYS) as client:
        for path, status in (("/pause", "paused"), ("/pause?mode=keep", "paused"), ("/resume", "resumed")):
            assert (await client.post(path, headers=ROOT)).json() == {"status": status}
        assert (await client.get("/is_paused", headers=ROOT)).json() == {"is_paused": True}
        update = {"update_info": {"path": "/a", "draft_path": "/b"}}
        reply = (await client.post("/update_weights", json=update, headers=ROOT)).json()
        assert [engine["weight_epoch"] for engine in reply["engines"]] == [3, 3]
        await client.post("/update_weights", json={"update_info": {"draft_path": "/b"}}, headers=ROOT)
    folders = Folder("/a"), Folder("/b")
    assert asked == [
        Pause("abort"),
        Pause("keep"),
        Resume(),
        Inspect(),
        LoadWeights(*folders),
        LoadWeights(draft=folders[1]),
    ]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/pause?mode=never", None, "mode=never: must be one of abort, wait, keep"),
        ("/update_weights", {"update_info": {}}, "give path, draft_path, or both"),
        ("/update_weights", {}, "update_info"),
        ("/update_weights", {"update_info": {"path": ""}}, "path"),
    ],
)
async def test_what_says_nothing_is_refused(path: str, body: Any, message: str) -> None:
    async with in_process(Asked(says("x")), api_keys=KEYS) as client:
        reply = await client.post(path, json=body, headers=ROOT)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"] and not asked


@pytest.mark.parametrize(
    ("outcomes", "status", "message"),
    [
        ((AdminOutcome("a"), AdminOutcome("b", error="no such file")), 409, "b: no such file"),
        ((AdminOutcome("a", fault="no answer in 670 s"),), 503, "a: no answer in 670 s"),
        ((), 503, "No engine is known yet"),
    ],
)
async def test_an_engine_that_fails_is_named(outcomes: Any, status: int, message: str) -> None:
    engine = Asked(says("x"))
    engine.outcomes = outcomes
    async with in_process(engine, api_keys=KEYS) as client:
        reply = await client.post("/update_weights", json={"update_info": {"path": "/a"}}, headers=ROOT)
    assert reply.status_code == status and message in reply.json()["error"]["message"]
