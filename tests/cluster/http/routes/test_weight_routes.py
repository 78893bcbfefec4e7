"""Routes for weights and pauses: who may use them, what engines are asked, and what comes of their answers."""

import base64
from typing import Any

import pytest

from aerie.cluster.http.app import build_app
from aerie.cluster.http.calls import Calls
from aerie.cluster.http.errors import RequestError
from aerie.cluster.http.keys import KeyConfig
from aerie.cluster.transport.admin import (
    AbortRequests,
    AdminCall,
    AdminOutcome,
    FinishUpdate,
    Inspect,
    JoinTrainer,
    Pause,
    Resume,
    Sleep,
    WakeUp,
)
from aerie.workers.scheduling.commands.command import Folder, LoadWeights, OpenTransfer, ReceiveWeights, StartUpdate
from tests.support.edge_client import edge_config, in_process
from tests.support.fake_engine import FakeEngine, chat_tokenizer, says

ROUTES = (
    ("POST", "/pause", None),
    ("POST", "/resume", None),
    ("GET", "/is_paused", None),
    ("POST", "/sleep", None),
    ("POST", "/wake_up", None),
    ("GET", "/is_sleeping", None),
    ("POST", "/abort_requests", {"request_ids": ["a"]}),
    ("GET", "/draft/versions", None),
    ("POST", "/draft/rollback", {"version": "0"}),
    ("POST", "/update_weights", {"update_info": {"path": "/a"}}),
    ("GET", "/weight_info", None),
    ("POST", "/init_weight_transfer_engine", {"init_info": {"master_address": "h", "master_port": 1, "world_size": 3}}),
    ("POST", "/start_weight_update", None),
    ("POST", "/start_draft_weight_update", None),
    ("POST", "/update_weights", {"update_info": {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2]]}}),
    ("POST", "/finish_weight_update", {"weight_version": "step-1"}),
    ("GET", "/get_world_size", None),
    ("POST", "/weight_checker", {"action": "checksum"}),
)
KEYS = (KeyConfig("root", "r" * 20, admin=True), KeyConfig("user", "u" * 20))
ROOT, USER = ({"Authorization": f"Bearer {letter * 20}"} for letter in "ru")


class Asked(FakeEngine):
    """Notes what engines are asked."""

    outcomes: tuple[AdminOutcome, ...] = (
        AdminOutcome("b", True, 3, num_ranks=1),
        AdminOutcome("a", weight_epoch=3, num_ranks=1),
    )

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
        assert len(asked) == (2 if path == "/init_weight_transfer_engine" else 1)


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


async def test_sleep_says_what_was_freed_and_what_stays() -> None:
    engine = Asked(says("x"))
    engine.outcomes = (AdminOutcome("a", is_sleeping=True, num_bytes=70, num_aborted=2),)
    async with in_process(engine, api_keys=KEYS) as client:
        replies = [
            (await client.post("/sleep?mode=wait&level=1", headers=ROOT)).json(),
            (await client.get("/is_sleeping", headers=ROOT)).json(),
            (await client.post("/wake_up?tags=weights", headers=ROOT)).json(),
            (await client.post("/wake_up?tags=weights&tags=kv_cache", headers=ROOT)).json(),
            (await client.post("/abort_requests", json={"request_ids": ["q", "r"]}, headers=ROOT)).json(),
        ]
    assert replies == [
        {"engines": [{"engine_id": "a", "freed_bytes": 70}], "status": "sleeping", "kept": ["weights"]},
        {"is_sleeping": True},
        {"status": "sleeping"},
        {"status": "awake"},
        {"aborted": 2},
    ]
    assert asked == [Sleep("wait"), Inspect(), Inspect(), WakeUp(), AbortRequests(("q", "r"))]


async def test_a_session_reaches_the_engines_with_a_rank_each() -> None:
    """The rank of an engine in the trainer's group follows from its place among the engines' names."""
    group = {"master_address": "10.0.0.1", "master_port": 29600, "world_size": 7, "rank_offset": 2}
    engine = Asked(says("x"))
    engine.outcomes = (AdminOutcome("b", num_ranks=4), AdminOutcome("a", num_ranks=1))
    async with in_process(engine, api_keys=KEYS) as client:
        assert (await client.get("/get_world_size", headers=ROOT)).json() == {"world_size": 5}
        unique = {"nccl_unique_id_b64": base64.b64encode(bytes(range(128))).decode(), "world_size": 6, "packed": False}
        info = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]], "packed": False}
        for path, body in (
            ("/init_weight_transfer_engine", {"init_info": group}),
            ("/init_weight_transfer_engine", {"init_info": unique}),
            ("/start_draft_weight_update", None),
            ("/update_weights", {"update_info": info}),
            ("/update_weights", {"update_info": {"names": []}}),
            ("/finish_weight_update", {"weight_version": "step-7"}),
        ):
            assert (await client.post(path, json=body, headers=ROOT)).status_code == 200
    assert [each for each in asked if not isinstance(each, Inspect)] == [
        JoinTrainer({"a": 2, "b": 3}, OpenTransfer("10.0.0.1", 29600, 2, 7, True, 1 << 30, 120.0)),
        JoinTrainer({"a": 1, "b": 2}, OpenTransfer("", 0, 1, 6, False, 1 << 30, 120.0, bytes(range(128)))),
        StartUpdate("draft"),
        ReceiveWeights(("a",), ("bfloat16",), ((2, 3),), False),
        ReceiveWeights((), (), ()),
        FinishUpdate("step-7"),
    ]


PLACE = {"master_address": "h", "master_port": 1}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/pause?mode=never", None, "mode=never: must be one of abort, wait, keep"),
        ("/sleep?level=2", None, "level=2: must be 1"),
        ("/sleep?mode=keep", None, "mode=keep: must be abort or wait"),
        ("/sleep?tags=weights", None, "tags=weights: must be one of kv_cache"),
        ("/wake_up?tags=kv", None, "tags=kv: must be one of weights, kv_cache"),
        ("/abort_requests", {"request_ids": "a"}, "request_ids"),
        ("/update_weights", {"update_info": {}}, "give path, draft_path, or both"),
        ("/update_weights", {}, "update_info"),
        ("/update_weights", {"update_info": {"path": ""}}, "path"),
        ("/weight_checker", {"action": "read"}, "action"),
        ("/update_weights", {"update_info": {"path": "/a", "names": ["x"]}}, "folders or names, not both"),
        ("/update_weights", {"update_info": {"names": ["x"]}}, "must have the same length"),
        ("/init_weight_transfer_engine", {"init_info": PLACE | {"world_size": 4}}, "must be 3"),
        ("/init_weight_transfer_engine", {"init_info": {"world_size": 3}}, "or nccl_unique_id_b64"),
        ("/init_weight_transfer_engine", {"init_info": {"world_size": 3, "nccl_unique_id_b64": "QUI="}}, "128 bytes"),
        ("/init_weight_transfer_engine", {"init_info": {"world_size": 3, "nccl_unique_id_b64": "*"}}, "128 bytes"),
        ("/init_weight_transfer_engine", {"init_info": PLACE | {"world_size": 3, "master_port": 70000}}, "master_port"),
        ("/init_weight_transfer_engine", {"init_info": PLACE | {"world_size": 3, "timeout_s": 1e9}}, "timeout_s"),
    ],
)
async def test_what_says_nothing_is_refused(path: str, body: Any, message: str) -> None:
    async with in_process(Asked(says("x")), api_keys=KEYS) as client:
        reply = await client.post(path, json=body, headers=ROOT)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"]
    assert all(isinstance(each, Inspect) for each in asked)


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


async def test_programs_of_the_cluster_need_no_key_and_others_in_their_name_their_rights() -> None:
    app = build_app(edge_config(api_keys=KEYS), chat_tokenizer(), Asked(says("x")))
    calls = Calls(app)
    assert await calls.administer("/pause?mode=keep", {}) == {"status": "paused"}
    assert await calls.administer("/get_world_size", {}) == {"world_size": 2}
    for tenant in ("user", "root"):
        if tenant == "user":
            with pytest.raises(RequestError, match="does not administer"):
                await calls.administer("/start_weight_update", {}, tenant=tenant)
        else:
            await calls.administer("/start_weight_update", {}, tenant=tenant)
    assert asked == [Pause("keep"), Inspect(), StartUpdate("target")]


async def test_handles_have_every_route_for_weights_prefix_caches_and_adapters() -> None:
    app = build_app(edge_config(), chat_tokenizer(), Asked(says("x")))
    others = "/flush_cache", "/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    expected = {path: method for method, path, _ in ROUTES} | dict.fromkeys(others, "POST")
    assert app.state.administration == expected
    with pytest.raises(ValueError, match="route 'v1/models': must be one of .*pause.*v1/unload_lora_adapter"):
        await Calls(app).administer("/v1/models", {})


async def test_checksums_are_compared_by_engine_rank_and_name() -> None:
    engine = Asked(says("x"))
    engine.outcomes = (AdminOutcome("a", sums=({"target.norm": "01", "target.head": "02"}, {"target.norm": "03"})),)
    async with in_process(engine, api_keys=KEYS) as client:
        sums = (await client.post("/weight_checker", json={"action": "checksum"}, headers=ROOT)).json()["checksums"]
        assert sums == {"a": [{"target.norm": "01", "target.head": "02"}, {"target.norm": "03"}]}
        compare = {"action": "compare", "baseline": sums}
        assert (await client.post("/weight_checker", json=compare, headers=ROOT)).json()["differing"] == []
        sums["a"][1]["target.norm"] = "04"
        del sums["a"][0]["target.head"]
        reply = await client.post("/weight_checker", json=compare, headers=ROOT)
        assert reply.json()["differing"] == ["a.0.target.head", "a.1.target.norm"]
        for wrong in (None, {"a": 1}, {"a": ["x"]}):
            reply = await client.post("/weight_checker", json=compare | {"baseline": wrong}, headers=ROOT)
            assert reply.status_code == 400 and "baseline" in reply.json()["error"]["message"]
