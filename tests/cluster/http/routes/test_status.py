"""The operator's routes: health, readiness, metrics, models, tokens, keys; and routes that do not exist."""

import asyncio
import logging

import httpx
import pytest

from aerie.cluster.http.app import build_app
from aerie.cluster.http.routes import status
from aerie.cluster.http.text.chat_template import ChatTemplate
from aerie.cluster.http.text.tokenizer import ChatTokenizer
from aerie.cluster.transport.messages import EngineStats
from tests.support.edge_client import CHAT, HELLO, MODEL, edge_config, in_process
from tests.support.fake_engine import CHATML, EOS, FakeEngine, chat_tokenizer, says, small_tokenizer


def _engines(*states: tuple[str, str]) -> FakeEngine:
    engines = [EngineStats(f"engine-{i}", status, detail) for i, (status, detail) in enumerate(states)]
    return FakeEngine(says("a"), engines)


@pytest.mark.parametrize("route", ["/health", "/health/ready", "/ready"])
async def test_one_ready_engine_is_enough(route: str) -> None:
    async with in_process(_engines(("recovering", ""), ("ready", ""))) as client:
        reply = await client.get(route)
    assert (reply.status_code, reply.json()["status"]) == (200, "ok")
    assert [engine["status"] for engine in reply.json()["engines"]] == ["recovering", "ready"]


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "No engine is ready: none is known yet"),
        ([("starting", "loading weights")], "No engine is ready: engine-0 is starting (loading weights)"),
        (
            [("recovering", "rank 1 died"), ("dead", "")],
            "No engine is ready: engine-0 is recovering (rank 1 died); engine-1 is dead",
        ),
        ([("draining", "")], "No engine is ready: engine-0 is draining"),
    ],
)
async def test_no_ready_engine_is_503_and_says_why(states: list[tuple[str, str]], message: str) -> None:
    async with in_process(_engines(*states)) as client:
        for route in ("/health", "/ready"):
            reply = await client.get(route)
            assert (reply.status_code, reply.json()["error"]["message"]) == (503, message)
            assert reply.headers["retry-after"] == "1"


async def test_statistics_that_cannot_be_had_are_no_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = _engines(("ready", ""))

    async def broken() -> list[EngineStats]:
        raise RuntimeError("/secret")

    monkeypatch.setattr(engine, "stats", broken)
    monkeypatch.setattr(engine, "health", broken)
    async with in_process(engine) as client:
        reply = await client.get("/health")
        assert (await client.get("/metrics")).status_code == 200
    assert reply.status_code == 503
    assert "secret" not in reply.text
    assert "cannot be had" in caplog.text


async def test_ready_engines_that_no_request_reaches_are_not_healthy_and_the_process_is_alive() -> None:
    engine = _engines(("ready", ""))
    engine.fault = "no engine took it within 4 s"
    async with in_process(engine) as client:
        for route in ("/health", "/health/ready"):
            reply = await client.get(route)
            assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
            assert reply.json()["error"]["message"] == f"Requests do not get through: {engine.fault}"
        live = await client.get("/health/live")
    assert (live.status_code, live.json()) == (200, {"status": "ok"})


async def test_models_wait_for_news_that_another_ingress_has_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """/health of one ingress has been 200; the next request comes to another one, which hears of it a little later."""
    monkeypatch.setattr(status, "NEWS_POLL_S", 0.01)
    engine = _engines(("starting", ""))
    async with in_process(engine) as client:
        listed = asyncio.create_task(client.get("/v1/models"))
        await asyncio.sleep(0.05)
        assert not listed.done()
        engine.engines = [EngineStats("engine-0", "ready")]
        assert (await listed).status_code == 200


async def test_models_are_listed_once_an_engine_has_been_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "NEWS_WAIT_S", 0.0)
    engine = _engines(("starting", ""))
    async with in_process(engine) as client:
        early = await client.get("/v1/models")
        assert early.status_code == 503 and early.headers["retry-after"] == "1"
        engine.engines = [EngineStats("engine-0", "ready")]
        assert (await client.get("/v1/models")).status_code == 200
        engine.engines = [EngineStats("engine-0", "recovering")]
        assert (await client.get(f"/v1/models/{MODEL}")).status_code == 200


async def test_models_and_their_lengths() -> None:
    async with in_process(FakeEngine(says("a"))) as client:
        models = (await client.get("/v1/models")).json()
        card = (await client.get(f"/v1/models/{MODEL}")).json()
        other = await client.get("/v1/models/other")
    assert models == {"object": "list", "data": [card]}
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 256)
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "condition, default", [("enable_thinking is defined and not enable_thinking", True), ("not enable_thinking", False)]
)
async def test_card_names_the_switch_of_thinking_and_the_sampling_defaults(condition: str, default: bool) -> None:
    """As Qwen3's templates switch, and those that reason only when asked to."""
    plain = chat_tokenizer()
    source = CHATML + "{% if " + condition + " %}<think></think>{% endif %}"
    tokenizer = ChatTokenizer(small_tokenizer(), ChatTemplate(source, {"eos_token": EOS}), plain.eos_token_ids)
    async with in_process(FakeEngine(says("a")), tokenizer, default_temperature=0.6, default_top_k=20) as client:
        card = (await client.get(f"/v1/models/{MODEL}")).json()
    assert card["thinking"] == {"variable": "enable_thinking", "default": default}
    assert card["default_sampling_params"] == {"temperature": 0.6, "top_k": 20}


async def test_card_of_a_template_that_only_mentions_thinking_has_no_switch() -> None:
    source = CHATML + "{# enable_thinking is not used #}"
    tokenizer = ChatTokenizer(small_tokenizer(), ChatTemplate(source, {"eos_token": EOS}), (0,))
    async with in_process(FakeEngine(says("a")), tokenizer) as client:
        card = (await client.get(f"/v1/models/{MODEL}")).json()
    assert card["thinking"] is None and card["default_sampling_params"] == {"temperature": 1.0}


async def test_further_names_of_the_model_are_listed_and_asked_by() -> None:
    async with in_process(FakeEngine(says("a")), model_aliases=("b", "c/d")) as client:
        models = (await client.get("/v1/models")).json()["data"]
        card = (await client.get("/v1/models/c/d")).json()
        body = {"model": "b", "prompt": "x", "max_tokens": 1}
        reply = (await client.post("/v1/completions", json=body)).json()
    assert [model["id"] for model in models] == [MODEL, "b", "c/d"] and {model["root"] for model in models} == {MODEL}
    assert card == models[2] and reply["model"] == MODEL


@pytest.mark.parametrize(
    "route, rest", [("completions", {"prompt": "x"}), ("chat/completions", HELLO), ("responses", {"input": "x"})]
)
async def test_default_is_the_served_model(route: str, rest: dict[str, object]) -> None:
    """As in SGLang's examples, which name no other model."""
    async with in_process(FakeEngine(says("a"))) as client:
        reply = await client.post(f"/v1/{route}", json=rest | {"model": "default"})
        models = (await client.get("/v1/models")).json()["data"]
    assert reply.status_code == 200 and reply.json()["model"] == MODEL
    assert [model["id"] for model in models] == [MODEL]


async def test_version() -> None:
    async with in_process(FakeEngine(says("a"))) as client:
        assert set((await client.get("/version")).json()) == {"version"}


async def test_tokenize_and_detokenize() -> None:
    async with in_process(FakeEngine(says("a"))) as client:
        text = (await client.post("/tokenize", json={"prompt": "hello ä", "return_token_strs": True})).json()
        chat = (await client.post("/tokenize", json={"messages": HELLO["messages"], "model": MODEL})).json()
        back = (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()
        both = await client.post("/tokenize", json={"prompt": "a", "messages": HELLO["messages"]})
        unknown = await client.post("/detokenize", json={"tokens": [10**6]})
        no_list = await client.post("/detokenize", json={"tokens": "abc"})
        model = await client.post("/tokenize", json={"prompt": "a", "model": "other"})
    tokens = small_tokenizer().encode("hello ä").ids
    assert (text["tokens"], text["count"], text["max_model_len"]) == (tokens, len(tokens), 256)
    assert text["token_strs"][-1] == "Ã¤"
    assert back["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (both.status_code, both.json()["error"]["param"]) == (400, "prompt")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "tokens[0]")
    assert (no_list.status_code, no_list.json()["error"]["param"]) == (400, "tokens")
    assert model.status_code == 404


@pytest.mark.parametrize("route", ["/v1/models", "/version", "/metrics", "/nope", CHAT])
@pytest.mark.parametrize("header", [None, "Bearer wrong-key", "Basic first-key", "Bearer", "first-key", "Bearer fïrst"])
async def test_keys_are_wanted_on_all_routes(route: str, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode()}
    async with in_process(FakeEngine(says("a")), api_keys=("first-key", "second-key")) as client:
        reply = await client.get(route, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"


async def test_right_keys_and_health_pass() -> None:
    async with in_process(FakeEngine(says("a")), api_keys=("first-key", "second-key")) as client:
        assert (await client.get("/health")).status_code == 200
        for header in ("Bearer first-key", "bearer second-key"):
            reply = await client.post(CHAT, json=HELLO, headers={"authorization": header})
            assert reply.status_code == 200


@pytest.mark.parametrize(
    ("method", "route", "status", "code"),
    [
        ("GET", "/none", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/redoc", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
async def test_unknown_routes_and_methods_have_openais_form(method: str, route: str, status: int, code: str) -> None:
    async with in_process(FakeEngine(says("a"))) as client:
        reply = await client.request(method, route)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in reply.headers) == (status == 405)


async def test_request_id_is_left_to_the_server_around_if_told_so() -> None:
    app = build_app(edge_config(), chat_tokenizer(), FakeEngine(says("a")), echo_request_id=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as client:
        assert "x-request-id" not in (await client.get("/health", headers={"x-request-id": "a"})).headers


async def test_bug_in_a_route_is_500_without_internals_and_logged_with_the_request_id(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(*_: object) -> bytes:
        raise RuntimeError("/secret")

    monkeypatch.setattr("aerie.cluster.http.routes.status.prometheus_text", bug)
    with caplog.at_level(logging.ERROR):
        async with in_process(FakeEngine(says("a"))) as client:
            reply = await client.get("/metrics", headers={"x-request-id": "trace-1"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert reply.headers["x-request-id"] == "trace-1"
    assert "secret" not in reply.text
    assert [record.message for record in caplog.records] == ["request trace-1: unexpected"]
