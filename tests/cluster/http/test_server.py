"""The application in a real server: OpenAI's client, clients that leave, many at once, and a corpus of nonsense."""

import asyncio
import json
import random
from typing import Any

import httpx
import openai
import pytest

from aerie.cluster.transport.messages import SpeculationStats, TokenDelta
from tests.support.edge_client import CHAT, HELLO, JSON, MODEL, PROMPT, TEXT, events, served, until
from tests.support.fake_engine import FakeEngine, refuses, says

MESSAGES: Any = HELLO["messages"]


def _client(url: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", **({"api_key": "none", "max_retries": 0} | options))


async def test_openai_client_chats() -> None:
    engine = FakeEngine(says("hello", " wörld", cached_tokens=3, speculation=SpeculationStats(2, (0, 2), 1, 2)))
    async with served(engine) as url, _client(url) as client:
        reply = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
        assert reply.choices[0].message.content == "hello wörld"
        assert reply.choices[0].finish_reason == "stop"
        assert reply.choices[0].logprobs is not None
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == 3
        assert reply.model_extra is not None
        assert reply.model_extra["metrics"]["speculative_decoding"]["mean_acceptance_length"] == 2.0
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello wörld"
        assert chunks[-1].usage == reply.usage


async def test_openai_client_completes_and_lists_models() -> None:
    async with served(FakeEngine(says("a", "b"))) as url, _client(url) as client:
        reply = await client.completions.create(model=MODEL, prompt=["x", "y"], n=2, logprobs=1)
        assert [choice.text for choice in reply.choices] == ["ab"] * 4
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "ab"
        assert [model.id async for model in await client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_openai_client_raises_its_own_exceptions() -> None:
    async with served(FakeEngine(says("a")), api_keys=("correct-key",), max_body_bytes=2000) as url:
        async with _client(url) as client:
            with pytest.raises(openai.AuthenticationError, match="API key"):
                await client.models.list()
        async with _client(url, api_key="correct-key") as client:
            with pytest.raises(openai.BadRequestError, match="temperature") as bad:
                await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
            assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.chat.completions.create(model="other", messages=MESSAGES)
            with pytest.raises(openai.APIStatusError, match="larger than 2000 bytes") as large:
                await client.completions.create(model=MODEL, prompt="x" * 3000)
            assert large.value.status_code == 413


async def test_openai_client_repeats_429_but_not_a_deadline() -> None:
    busy = FakeEngine(refuses("queue_full", retry_after_s=0.01))
    async with served(busy) as url, _client(url, max_retries=2) as client:
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model=MODEL, prompt="x")
    assert len(busy.calls) == 3
    slow = FakeEngine(lambda p, s: [60.0])
    async with served(slow, request_timeout_s=0.05) as url, _client(url, max_retries=2) as client:
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model=MODEL, prompt="x")
    assert len(slow.calls) == 1


async def test_openai_client_sees_an_error_within_a_stream() -> None:
    engine = FakeEngine(lambda p, s: [TokenDelta("", (64,)), TokenDelta("", (), "error", error="rank 1 died")])
    async with served(engine) as url, _client(url) as client:
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="The engine failed"):
            async for _ in stream:
                pass


@pytest.mark.parametrize(
    "body",
    [PROMPT | {"stream": True}, PROMPT, PROMPT | {"stream": True, "n": 3}, PROMPT | {"n": 3}],
    ids=["stream", "whole", "stream-3", "whole-3"],
)
async def test_client_that_leaves_aborts_its_generations(body: dict[str, Any]) -> None:
    engine = FakeEngine(lambda p, s: [TokenDelta("", (64,)), 60.0])
    n = body.get("n", 1)
    async with served(engine) as url, httpx.AsyncClient() as client:
        request = asyncio.ensure_future(_read_all(client, url + TEXT, body))
        await until(lambda: engine.num_active == n)
        await asyncio.sleep(0.05)
        request.cancel()
        await until(lambda: engine.num_active == 0)
        assert len(engine.closed) == n
        # Its places are free again.
        assert (await client.get(url + "/ready")).status_code == 200


async def test_client_that_leaves_before_the_first_token_aborts_too() -> None:
    engine = FakeEngine(lambda p, s: [60.0])
    async with served(engine) as url, httpx.AsyncClient() as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(url + TEXT, json=PROMPT | {"stream": True}, timeout=httpx.Timeout(60, read=0.1))
        await until(lambda: engine.num_active == 0)


async def _read_all(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
    async with client.stream("POST", url, json=body) as reply:
        async for _ in reply.aiter_bytes():
            pass


async def test_32_streams_at_once_do_not_mix() -> None:
    def script(prompt: list[int], sampling: Any) -> Any:
        """Each answer repeats its own prompt."""
        for _ in range(20):
            yield 0.001
            yield TokenDelta("", tuple(prompt))
        yield TokenDelta("", (), "length")

    engine = FakeEngine(script)
    async with served(engine) as url, httpx.AsyncClient() as client:

        async def one(i: int) -> str:
            reply = await client.post(url + TEXT, json=PROMPT | {"prompt": f"<{i}>", "stream": True})
            return "".join(chunk["choices"][0]["text"] for chunk in events(reply.text))

        texts = await asyncio.gather(*(one(i) for i in range(32)))
    assert texts == [f"<{i}>" * 20 for i in range(32)]
    assert engine.max_active > 16


async def test_request_id_is_the_clients_or_new_and_echoed_everywhere() -> None:
    engine = FakeEngine(says("a"))
    async with served(engine) as url, httpx.AsyncClient(base_url=url) as client:
        named = {"x-request-id": "trace-1"}
        for route in ("/health", "/nope", "/v1/models"):
            assert (await client.get(route, headers=named)).headers["x-request-id"] == "trace-1"
        replies = [await client.post(CHAT, json=HELLO | {"stream": s}, headers=named) for s in (True, False)]
        assert [reply.headers["x-request-id"] for reply in replies] == ["trace-1"] * 2
        reply = await client.post(CHAT, json=HELLO | {"request_id": "body-1"}, headers=named)
        assert reply.headers.get_list("x-request-id") == ["body-1"]
        new = {(await client.get("/version")).headers["x-request-id"] for _ in range(3)}
        assert len(new) == 3
        bad = await client.get("/version", headers={"x-request-id": "x" * 129})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "X-Request-Id")
    assert len({call.request_id for call in engine.calls}) == 3, "the engine's own ids are unique"


FIELDS = [
    "model",
    "messages",
    "prompt",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "seed",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "stream",
    "stream_options",
    "tools",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_choice",
    "echo",
    "best_of",
    "user",
    "metadata",
    "request_id",
    "suffix",
    "chat_template_kwargs",
    "add_generation_prompt",
    "presence_penalty",
    "speculative",
    "ignore_eos",
    "tokens",
]


def _nonsense(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value that looks for trouble."""
    simple = [
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        -(2**63) - 1,
        10**25,
        0.5,
        1e308,
        -1e-308,
        "",
        "a",
        "\x00",
        "\u2028",
        "x" * 3000,
        "{{ 7*7 }}",
        "<|im_end|>",
        "none",
        "text",
        [],
        {},
        [[]],
        {"type": "text"},
        [None],
        [1.5],
        ["a"],
    ]
    if depth > 2 or rng.random() < 0.7:
        return rng.choice(simple)
    if rng.random() < 0.5:
        return [_nonsense(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(["role", "content", "type", "text", "1", ""]): _nonsense(rng, depth + 1) for _ in range(3)}


async def test_nonsense_is_never_a_server_error() -> None:
    """300 valid bodies with one or two fields replaced, 100 bodies cut or with a byte changed. Seeded."""
    rng = random.Random(7)
    bases: list[tuple[str, dict[str, Any]]] = [
        (CHAT, HELLO),
        (TEXT, PROMPT),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ]
    engine = FakeEngine(says("a", "b"))
    statuses: list[int] = []
    async with served(engine) as url, httpx.AsyncClient(base_url=url) as client:
        for i in range(400):
            route, base = rng.choice(bases)
            body = dict(base)
            for field in rng.sample(FIELDS, rng.choice([1, 1, 2])):
                body[field] = _nonsense(rng)
            raw = bytearray(json.dumps(body if i < 300 else base).encode())
            if i >= 300:
                raw[rng.randrange(len(raw))] = rng.randrange(256)
                raw = raw[: rng.randrange(len(raw)) + 1] if rng.random() < 0.5 else raw
            reply = await client.post(route, content=bytes(raw), headers=JSON)
            statuses.append(reply.status_code)
            assert reply.status_code in (200, 400, 404), (reply.status_code, reply.text, bytes(raw)[:300])
            if reply.status_code != 200:
                assert set(reply.json()) == {"error"}
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
                assert reply.json()["error"]["message"]
    assert statuses.count(200) > 10
    assert engine.num_active == 0


async def test_body_over_the_limit_is_413_however_it_is_sent() -> None:
    async def unannounced() -> Any:
        for _ in range(100):
            yield b" " * 1000

    async with served(FakeEngine(says("a")), max_body_bytes=5000) as url, httpx.AsyncClient(base_url=url) as client:
        for content in (b" " * 5001, unannounced()):
            reply = await client.post(CHAT, content=content, headers=JSON)
            assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        assert (await client.post(CHAT, json=HELLO)).status_code == 200
