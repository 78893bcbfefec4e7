"""Two applications on one cluster, each with its path, model and handle, and a deployment that calls one of them. Their
ranks are scripted."""

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from aerie.cluster.http.errors import RequestError
from tests.e2e.checkpoint import make_tokenizer
from tests.e2e.serving import Server, serving, wait_idle
from tests.support.scripted import VOCABULARY
from tests.support.tiny_models import make_target

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]

KEY = "key-of-the-second"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "ignore_eos": True, "seed": 3}
ENDLESS = CHAT | {"max_tokens": 3500}  # 9 s


@pytest.fixture(scope="module")
def servers(ray_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """The second has a key."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    make_tokenizer(make_target(folder / "target", vocab_size=VOCABULARY, max_position_embeddings=4096), VOCABULARY)

    def args(name: str, **ingress: Any) -> dict[str, Any]:
        return {
            "model": {"path": "target", "device": "cpu"},
            "parallel": {"tensor_parallel": 1},
            "ingress": {"served_model_name": name, "num_replicas": 1, **ingress},
        }

    keys = {"api_keys": [{"name": "team", "key": KEY}]}
    with (
        serving(ray_port, args("one"), folder, True, "first", "/first") as first,
        serving(ray_port, args("two", **keys), folder, True, "second", "/teams/second") as second,
    ):
        yield [first, second]


def _handle(name: str) -> Any:
    from ray import serve

    return serve.get_app_handle(name)


def test_each_has_its_probes_its_page_and_its_metrics(servers: list[Server]) -> None:
    keyed = {"authorization": f"Bearer {KEY}"}
    for server, headers in zip(servers, ({}, keyed), strict=True):
        public = {"host": "balancer.example.com"}
        for path in ("/health", "/health/ready", "/ping", "/", "/page/page.js"):
            assert httpx.get(server.url + path, headers=public, timeout=30).status_code == 200, path
        page = httpx.get(server.url, follow_redirects=True, timeout=30)
        assert page.status_code == 200 and str(page.url) == server.url + "/"
        models = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=30).json()
        assert [model["id"] for model in models["data"]] == [server.model]
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=headers, timeout=60)
        assert reply.status_code == 200 and reply.json()["model"] == server.model
        text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=30).text
        assert set(re.findall(r'model_name="(\w+)"', text)) == {server.model}
        assert re.search(r'aerie:http_requests_total{.*route="/v1/chat/completions",status="200"', text)
    assert httpx.get(f"{servers[1].url}/v1/models", timeout=30).status_code == 401


def test_handles_answer_as_http_does(servers: list[Server]) -> None:
    for name, server in zip(("first", "second"), servers, strict=True):
        handle = _handle(name)
        whole = handle.chat.remote(CHAT).result(timeout_s=60)
        assert whole["model"] == server.model and whole["usage"]["completion_tokens"] == 12
        streaming = handle.options(stream=True)
        chunks = list(streaming.chat.remote(CHAT))
        assert [event["object"] for event in streaming.completions.remote({"prompt": "hi", "max_tokens": 1})]
        assert {event["object"] for event in streaming.chat.remote(CHAT | {"stream": True})} == {chunks[0]["object"]}
        pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
        assert "".join(pieces) == whole["choices"][0]["message"]["content"] and len(chunks) > 3
        body = {"prompt": "hi", "max_tokens": 3, "ignore_eos": True}
        assert handle.completions.remote(body).result(timeout_s=60)["usage"]["completion_tokens"] == 3
        assert handle.generate.remote({"text": "hi", "sampling_params": {"max_new_tokens": 3}}).result(timeout_s=60)
        events = list(streaming.responses.remote({"input": "hi", "max_output_tokens": 16, "stream": True}))
        assert events[0]["type"] == "response.created" and events[-1]["type"].startswith("response.")
        assert handle.tokenize.remote({"prompt": "hi"}).result(timeout_s=60)["count"] == 2
        if name == "second":
            assert (
                handle.chat.remote(CHAT, tenant="team", request_id="mine").result(timeout_s=60)["id"].endswith("mine")
            )


def test_errors_reach_the_caller_with_their_code(servers: list[Server]) -> None:
    handle = _handle("first")
    with pytest.raises(RequestError, match="temperature") as raised:
        handle.chat.remote(CHAT | {"temperature": -1}).result(timeout_s=60)
    assert (raised.value.status, raised.value.code, raised.value.param) == (400, "invalid_value", "temperature")
    with pytest.raises(RequestError, match="tenant=nobody"):
        next(handle.options(stream=True).chat.remote(CHAT | {"stream": True}, tenant="nobody"))
    with pytest.raises(TypeError, match=r"handle.options\(stream=True\)"):
        handle.chat.remote(CHAT | {"stream": True}).result(timeout_s=60)


@pytest.mark.parametrize("streams", [False, True])
def test_a_cancelled_call_frees_its_request(servers: list[Server], streams: bool) -> None:
    handle = _handle("first").options(stream=streams)
    response = handle.chat.remote(ENDLESS | {"stream": streams})
    if streams:
        assert next(response)
    else:
        time.sleep(0.5)
    response.cancel()
    wait_idle(4, "first")
    assert (
        'reason="client_left",route="/v1/chat/completions"' in httpx.get(f"{servers[0].url}/metrics", timeout=30).text
    )


def test_a_deployment_calls_a_model_by_its_handle(servers: list[Server]) -> None:
    """The example, and that the chat ends when its client leaves."""
    import importlib

    from ray import serve

    example = importlib.import_module("examples.documents")
    port = servers[0].port
    handle = serve.run(example.Documents.bind(example.PARAGRAPHS, "first"), name="documents", route_prefix="/documents")
    try:
        question, url = {"question": "What is a slot?"}, f"http://127.0.0.1:{port}/documents"
        assert handle.answer.remote(question["question"]).result(timeout_s=60)
        assert httpx.post(url, json=question, timeout=60).text

        async def leave() -> None:
            async with httpx.AsyncClient(timeout=60) as client, client.stream("POST", url, json=question) as reply:
                await anext(reply.aiter_raw())

        asyncio.run(leave())
        wait_idle(4, "first")
    finally:
        serve.delete("documents")
