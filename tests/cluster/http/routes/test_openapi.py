"""The OpenAPI document describes what the routes take and give: real requests and replies are held against it."""

import json
from typing import Any

import jsonschema
import pytest

from aerie.cluster.http.app import build_app
from aerie.cluster.http.middleware import OPEN_ROUTES
from aerie.cluster.http.page.files import PAGE_ROUTES
from aerie.cluster.transport.messages import EngineStats, FlushOutcome, SpeculationStats
from tests.support.edge_client import CHAT, HELLO, MODEL, PROMPT, TEXT, edge_config, events, in_process
from tests.support.fake_engine import FakeEngine, chat_tokenizer, says

ANSWER = says("hello", " wörld", cached_tokens=3, speculation=SpeculationStats(2, (0, 2), 1, 2))
USAGE = {"stream_options": {"include_usage": True}}
GENERATIONS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, HELLO),
    (CHAT, HELLO | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "stop": ["ld"]}),
    (CHAT, HELLO | {"n": 2, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
    (TEXT, PROMPT),
    (TEXT, PROMPT | {"logprobs": 2, "return_token_ids": True, "stop_token_ids": [72]}),
    (TEXT, PROMPT | {"prompt": [[64], [65, 66]], "echo": True}),
    (TEXT, PROMPT | {"prompt": [64, 65], "logprobs": 0}),
    (TEXT, PROMPT | {"prompt": [64, 65], "logprobs": 1, "echo": True}),
]


_DOCUMENTS: dict[str, str] = {}  # by configuration: each takes a quarter of a second


async def _document(**config: Any) -> dict[str, Any]:
    key = repr(config)
    if key not in _DOCUMENTS:
        async with in_process(FakeEngine(ANSWER), **config) as client:
            reply = await client.get("/openapi.json")
        assert reply.status_code == 200
        _DOCUMENTS[key] = reply.text
    document: dict[str, Any] = json.loads(_DOCUMENTS[key])
    return document


def _check(document: dict[str, Any], value: Any, *where: str) -> None:
    """`value` fits the schema that stands at `where` in the document."""
    schema: Any = document
    for key in where:
        schema = schema[key]
    # The references in the schema start at the document's root.
    jsonschema.Draft202012Validator({**document, **schema}).validate(value)


def _reply_schema(path: str, method: str, status: str, media: str = "application/json") -> tuple[str, ...]:
    return "paths", path, method, "responses", status, "content", media, "schema"


@pytest.mark.parametrize(("route", "body"), [(CHAT, HELLO), (TEXT, PROMPT)])
async def test_logprobs_of_prompts_fit_the_document(route: str, body: dict[str, Any]) -> None:
    async with in_process(FakeEngine(ANSWER)) as client:
        reply = await client.post(route, json=body | {"prompt_logprobs": 1})
    _check(await _document(), reply.json(), *_reply_schema(route, "post", "200"))


async def test_messages_fit_the_document() -> None:
    document, body = await _document(), HELLO | {"max_tokens": 9}
    async with in_process(FakeEngine(ANSWER)) as client:
        whole = await client.post("/v1/messages", json=body)
        stream = await client.post("/v1/messages", json=body | {"stream": True})
        wrong = await client.post("/v1/messages", json=HELLO)
    _check(document, whole.json(), *_reply_schema("/v1/messages", "post", "200"))
    for event in stream.text.removesuffix("\n\n").split("\n\n"):
        data = json.loads(event.partition("data: ")[2])
        _check(document, data, *_reply_schema("/v1/messages", "post", "200", "text/event-stream"))
    _check(document, wrong.json(), *_reply_schema("/v1/messages", "post", "default"))


async def test_every_route_is_in_the_document() -> None:
    app = build_app(edge_config(), chat_tokenizer(), FakeEngine(ANSWER))
    routes = {(route.path.replace(":path", ""), *(route.methods - {"HEAD"})) for route in app.routes}  # type: ignore[attr-defined]
    documented = {
        (path, method.upper()) for path, methods in (await _document())["paths"].items() for method in methods
    }
    assert routes == documented | {(path, "GET") for path in (*PAGE_ROUTES, "/openapi.json", "/docs")}


async def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    document = await _document()
    text = json.dumps(document)
    schemas = document["components"]["schemas"]
    assert set(schemas) == {ref.partition('"')[0] for ref in text.split("#/components/schemas/")[1:]}
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_responses_fit_whole_and_streamed_and_stored() -> None:
    document = await _document()
    body = {"model": MODEL, "input": "hi", "top_logprobs": 1}
    path = "/v1/responses"
    _check(document, body, "paths", path, "post", "requestBody", "content", "application/json", "schema")
    async with in_process(FakeEngine(ANSWER)) as client:
        whole = await client.post(path, json=body)
        stored = await client.get(f"{path}/{whole.json()['id']}")
        stream = await client.post(path, json=body | {"stream": True})
        removed = await client.delete(f"{path}/{whole.json()['id']}")
    one = f"{path}/{{response_id}}"
    _check(document, whole.json(), *_reply_schema(path, "post", "200"))
    _check(document, stored.json(), *_reply_schema(one, "get", "200"))
    _check(document, removed.json(), *_reply_schema(one, "delete", "200"))
    for block in stream.text.removesuffix("\n\n").split("\n\n"):
        event = json.loads(block.partition("\ndata: ")[2])
        _check(document, event, *_reply_schema(path, "post", "200", "text/event-stream"))


async def test_the_page_for_people_has_every_route_and_schema() -> None:
    document = await _document()
    async with in_process(FakeEngine(ANSWER)) as client:
        page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert all(f" {path}</code>" in page.text for path in document["paths"])
    assert all(f'id="{name}"' in page.text for name in document["components"]["schemas"])


@pytest.mark.parametrize(("route", "body"), GENERATIONS)
async def test_requests_and_replies_of_generation_fit(route: str, body: dict[str, Any]) -> None:
    document = await _document()
    _check(document, body, "paths", route, "post", "requestBody", "content", "application/json", "schema")
    async with in_process(FakeEngine(ANSWER)) as client:
        whole = await client.post(route, json=body)
        streams = [await client.post(route, json=body | extra | {"stream": True}) for extra in ({}, USAGE)]
    assert whole.status_code == 200
    _check(document, whole.json(), *_reply_schema(route, "post", "200"))
    for stream in streams:
        chunks = events(stream.text)
        assert len(chunks) >= 2
        for chunk in chunks:
            _check(document, chunk, *_reply_schema(route, "post", "200", "text/event-stream"))


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("post", "/tokenize", {"prompt": "hello", "return_token_strs": True}),
        ("post", "/tokenize", {"messages": HELLO["messages"]}),
        ("post", "/detokenize", {"tokens": [64]}),
        ("get", "/v1/models", None),
        ("get", f"/v1/models/{MODEL}", None),
        ("get", "/version", None),
        ("get", "/get_model_info", None),
        ("get", "/ping", None),
        ("post", "/ping", None),
        ("post", "/generate", {"text": "hello", "return_logprob": True, "top_logprobs_num": 1}),
        ("get", "/tokenizer_info", None),
        ("get", "/health", None),
        ("get", "/health/live", None),
        ("get", "/health/ready", None),
        ("get", "/ready", None),
        ("post", "/flush_cache", None),
        ("post", "/reset_prefix_cache", None),
    ],
)
async def test_replies_of_other_routes_fit(method: str, path: str, body: Any) -> None:
    document = await _document()
    engine = FakeEngine(ANSWER, flushes=[[FlushOutcome("a", num_pages=3)]])
    async with in_process(engine) as client:
        reply = await client.request(method, path, json=body)
    assert reply.status_code == 200
    _check(document, reply.json(), *_reply_schema(path.replace(MODEL, "{model}"), method, "200"))


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("post", CHAT, HELLO | {"n": 0}), ("get", "/v1/models/other", None), ("get", "/health", None)],
)
async def test_errors_fit(method: str, path: str, body: Any) -> None:
    document = await _document()
    async with in_process(FakeEngine(ANSWER, [EngineStats("a", "dead")])) as client:
        reply = await client.request(method, path, json=body)
    assert reply.status_code >= 400
    _check(document, reply.json(), *_reply_schema(path.replace("other", "{model}"), method, "default"))


async def test_what_does_not_fit_is_noticed() -> None:
    document = await _document()
    async with in_process(FakeEngine(ANSWER)) as client:
        reply = (await client.post(CHAT, json=HELLO)).json()
    del reply["choices"][0]["finish_reason"]
    with pytest.raises(jsonschema.ValidationError, match="finish_reason"):
        _check(document, reply, *_reply_schema(CHAT, "post", "200"))
    with pytest.raises(jsonschema.ValidationError, match="surprise"):
        _check(document, {"version": "1", "surprise": 1}, *_reply_schema("/version", "get", "200"))


async def test_the_document_wants_a_key_where_there_are_keys() -> None:
    assert "/openapi.json" not in OPEN_ROUTES
    async with in_process(FakeEngine(ANSWER), api_keys=("first-key",)) as client:
        assert (await client.get("/openapi.json")).status_code == 401
