"""Requests of one API key and those of another: what they share, and what they do not."""

import asyncio
import itertools
import math
import re
from typing import Any

import httpx
import msgspec
import pytest

from aerie.cluster.http import tenants as tenants_module
from aerie.cluster.http.keys import KeyConfig
from aerie.cluster.start_log import MarkedFormatter
from aerie.workers.scheduling.request import Owner
from tests.support.edge_client import CHAT, HELLO, PROMPT, RESPONSES, TEXT, edge_config, in_process
from tests.support.fake_engine import FakeEngine, says

ANN, BOB = "the-key-of-ann", "the-key-of-bob"
KEYS = (KeyConfig("ann", ANN, admin=True), KeyConfig("bob", BOB))
MESSAGES = "/v1/messages"


def of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def _salts(route: str, body: dict[str, Any], **config: Any) -> list[bytes]:
    """The salts of Ann's and of Bob's request, and of a second one of Ann's."""
    engine = FakeEngine(says("x"))
    async with in_process(engine, **config) as client:
        for key in (ANN, BOB, ANN):
            assert (await client.post(route, json=body, headers=of(key))).status_code == 200
    return [call.sampling.cache_salt for call in engine.calls]


@pytest.mark.parametrize("more", [{}, {"cache_salt": "mine"}])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, HELLO),
        (TEXT, PROMPT),
        ("/invocations", PROMPT),
        (f"{CHAT}/batch", HELLO | {"messages": [HELLO["messages"]]}),
        (RESPONSES, {"input": "hi"}),
        (MESSAGES, HELLO | {"max_tokens": 4}),
        ("/generate", {"text": "hi"}),
    ],
)
async def test_cached_prefixes_are_those_of_the_key(route: str, body: dict[str, Any], more: dict[str, str]) -> None:
    if route == "/generate":
        more = {}  # has no cache_salt
    ann, bob, again = await _salts(route, body | more, api_keys=KEYS)
    assert ann == again != bob and ann and bob
    shared = await _salts(route, body | more, api_keys=KEYS, share_prefix_cache=True)
    assert len(set(shared)) == 1 and bool(shared[0]) is bool(more)


async def test_no_client_chooses_the_salt_of_another() -> None:
    plain = await _salts(TEXT, PROMPT, api_keys=KEYS)
    for salt in (plain[0].hex(), "ann", "tenant", ""):
        body = PROMPT | ({"cache_salt": salt} if salt else {})
        assert (await _salts(TEXT, body, api_keys=KEYS))[1] != plain[0]


async def test_one_key_and_no_key_use_the_cache_as_ever() -> None:
    engine = FakeEngine(says("x"))
    for config, headers in (({}, {}), ({"api_keys": (ANN,)}, of(ANN))):
        async with in_process(engine, **config) as client:
            assert (await client.post(TEXT, json=PROMPT, headers=headers)).status_code == 200
    assert [call.sampling.cache_salt for call in engine.calls] == [b"", b""]


async def test_a_stored_response_is_its_keys_alone() -> None:
    async with in_process(FakeEngine(says("x")), api_keys=KEYS) as client:
        made = (await client.post(RESPONSES, json={"input": "hi"}, headers=of(ANN))).json()["id"]
        url, later = f"{RESPONSES}/{made}", {"input": "and?", "previous_response_id": made}
        unknown = await client.get(f"{RESPONSES}/resp_none", headers=of(BOB))
        for reply in (
            await client.get(url, headers=of(BOB)),
            await client.get(url, params={"stream": "true"}, headers=of(BOB)),
            await client.delete(url, headers=of(BOB)),
            await client.post(f"{url}/cancel", headers=of(BOB)),
            await client.post(RESPONSES, json=later, headers=of(BOB)),
        ):
            assert reply.status_code == 404
            if "cancel" not in str(reply.url):  # which is no route here, for any key
                assert reply.json()["error"]["message"] == unknown.json()["error"]["message"].replace("resp_none", made)
        assert (await client.get(url, headers=of(ANN))).json()["id"] == made
        assert (await client.post(RESPONSES, json=later, headers=of(ANN))).status_code == 200
        assert (await client.delete(url, headers=of(ANN))).status_code == 200
        assert (await client.get(url, headers=of(ANN))).status_code == 404


async def test_many_responses_of_one_key_drop_none_of_another() -> None:
    async with in_process(FakeEngine(says("x")), api_keys=KEYS, max_stored_responses=4) as client:

        async def made(key: str) -> str:
            reply = await client.post(RESPONSES, json={"input": "hi"}, headers=of(key))
            return f"{RESPONSES}/{reply.json()['id']}"

        kept = await made(ANN)
        urls = [await made(BOB) for _ in range(9)]
        assert (await client.get(kept, headers=of(ANN))).status_code == 200
        statuses = [(await client.get(url, headers=of(BOB))).status_code for url in urls]
        assert statuses == [404] * 6 + [200] * 3


@pytest.mark.parametrize("route", ["/flush_cache", "/reset_prefix_cache"])
async def test_only_a_key_that_administers_empties_the_cache(route: str) -> None:
    async def status(keys: tuple[KeyConfig | str, ...], key: str) -> httpx.Response:
        async with in_process(FakeEngine(says("x")), api_keys=keys) as client:
            return await client.post(route, headers=of(key))

    refused = await status(KEYS, BOB)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
    assert "bob" in refused.text and "admin: true" in refused.text and BOB not in refused.text
    assert (await status(KEYS, ANN)).status_code == 200
    assert (await status((BOB,), BOB)).status_code == 200, "the only key administers"
    assert (await status((KeyConfig("bob", BOB, admin=False),), BOB)).status_code == 403
    assert (await status((ANN, BOB), BOB)).status_code == 403, "of several none, unless one is named"


async def test_probes_are_open_and_all_else_wants_a_key() -> None:
    async with in_process(FakeEngine(says("x")), api_keys=KEYS) as client:
        for path in ("/ready", "/health/ready", "/health"):
            assert (await client.get(path)).status_code == 200
        for path in ("/metrics", "/v1/models"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers={"x-api-key": BOB})).status_code == 200
            for password, status in ((BOB, 200), ("wrong-key", 401), ("", 401)):
                assert (await client.get(path, auth=("any", password))).status_code == status
            assert (await client.get(path, headers={"authorization": "Basic ?"})).status_code == 401


def test_every_key_is_compared_whichever_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    from aerie.cluster.http.tenants import Tenants

    tenants = Tenants(edge_config(api_keys=KEYS))
    counts = itertools.count()
    compare = hmac.compare_digest

    def counted(a: str, b: str) -> bool:
        next(counts)
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    found = [tenants.by_key(key) for key in (ANN, BOB, "unknown", "")]
    assert [tenant and tenant.name for tenant in found] == ["ann", "bob", None, None]
    assert next(counts) == 4 * len(KEYS)


class _Minute:
    """A clock that stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Minute:
    """The clock of all limits."""
    found = _Minute()
    make = tenants_module.Bucket.__init__
    monkeypatch.setattr(tenants_module.Bucket, "__init__", lambda self, per_minute, _: make(self, per_minute, found))
    return found


ROUTES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, HELLO),
    (TEXT, PROMPT),
    (RESPONSES, {"input": "hi"}),
    (MESSAGES, HELLO | {"max_tokens": 4}),
    ("/generate", {"text": "hi"}),
]


@pytest.mark.parametrize(("route", "body"), ROUTES)
async def test_requests_a_minute_are_limited_in_each_formats_error(
    route: str, body: dict[str, Any], clock: _Minute
) -> None:
    keys = (KeyConfig("ann", ANN, requests_per_minute=2), KeyConfig("bob", BOB))
    async with in_process(FakeEngine(says("x")), api_keys=keys) as client:
        replies = [await client.post(route, json=body, headers=of(ANN)) for _ in range(3)]
        other = await client.post(route, json=body, headers=of(BOB))
        clock.now += 30.0
        later = await client.post(route, json=body, headers=of(ANN))
    assert [reply.status_code for reply in (*replies, other, later)] == [200, 200, 429, 200, 200]
    told = [
        [reply.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining", "reset")] for reply in replies
    ]
    assert told == [["2", "1", "30s"], ["2", "0", "1m0s"], ["2", "0", "1m0s"]]
    assert not [name for name in other.headers if name.startswith("x-ratelimit")]
    refused = replies[2]
    assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("30", "30000")
    error = refused.json()["error"]
    assert "ann" in error["message"] and "2 requests a minute" in error["message"] and ANN not in refused.text
    if route == MESSAGES:
        assert (refused.json()["type"], error["type"]) == ("error", "rate_limit_error")
    else:
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")


async def test_tokens_a_minute_count_prompts_and_answers(clock: _Minute) -> None:
    keys = (KeyConfig("ann", ANN, tokens_per_minute=20),)
    engine = FakeEngine(says("one", " two", " three"))
    async with in_process(engine, api_keys=keys) as client:
        first = await client.post(TEXT, json=PROMPT | {"stream": True}, headers=of(ANN))
        used = len(engine.calls[0].prompt) + 13 + 1  # bytes of the answer, and the end
        second = await client.post(TEXT, json=PROMPT, headers=of(ANN))
        refused = await client.post(TEXT, json=PROMPT, headers=of(ANN))
        clock.now += 60.0
        late = await client.post(TEXT, json=PROMPT, headers=of(ANN))
        clock.now += 60.0
        too_long = await client.post(TEXT, json=PROMPT | {"prompt": "x y z " * 9}, headers=of(ANN))
    assert first.headers["x-ratelimit-remaining-tokens"] == str(20 - len(engine.calls[0].prompt) - 3), (
        "with its first tokens"
    )
    assert (first.status_code, second.status_code, late.status_code) == (200, 200, 200)
    assert refused.status_code == 429 and refused.json()["error"]["type"] == "tokens"
    assert int(refused.headers["retry-after"]) == math.ceil((2 * used - 20 + 1) * 3.0)
    assert (too_long.status_code, too_long.headers["x-should-retry"]) == (429, "false")
    assert "shorten it" in too_long.text


async def test_generations_in_flight_are_limited_and_free_again() -> None:
    keys = (KeyConfig("ann", ANN, max_concurrent_requests=3), KeyConfig("bob", BOB))
    engine = FakeEngine(says("a", "b", delay_s=0.2))
    async with in_process(engine, api_keys=keys) as client:
        two = PROMPT | {"n": 2}
        replies = await asyncio.gather(*(client.post(TEXT, json=two, headers=of(key)) for key in (ANN, ANN, BOB, BOB)))
        assert [reply.status_code for reply in replies] == [200, 429, 200, 200]
        assert "2 of 3 generations" in replies[1].text and replies[1].headers["retry-after"] == "1"
        assert (await client.post(TEXT, json=two, headers=of(ANN))).status_code == 200
        never = await client.post(TEXT, json=PROMPT | {"n": 4}, headers=of(ANN))
        assert (never.status_code, never.headers["x-should-retry"]) == (429, "false")


def test_limits_are_divided_among_ingresses_exactly() -> None:
    key = KeyConfig("a", ANN, requests_per_minute=100, tokens_per_minute=10.0, max_concurrent_requests=7)
    part = key.part(3)
    assert (part.requests_per_minute, part.tokens_per_minute) == (100 / 3, 10 / 3)
    assert part.max_concurrent_requests == 2 and key.part(1) is key
    with pytest.raises(ValueError, match="max_concurrent_requests=7 of a: .* at least 8; raise it"):
        key.part(8)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"requests_per_minute": 0}, "requests_per_minute=0: must be above 0"),
        ({"weight": 0.0}, "weight=0.0: must be at least 0.001 and at most 1000"),
        ({"priority_limit": 101}, "priority_limit=101: must be at least -100 and at most 100"),
    ],
)
def test_wrong_limits_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        KeyConfig("a", ANN, **wrong)


@pytest.mark.parametrize(("route", "body"), ROUTES[:3])
async def test_the_engine_is_told_key_weight_and_allowed_priority(route: str, body: dict[str, Any]) -> None:
    keys = (KeyConfig("ann", ANN, weight=3.0, priority_limit=-2), KeyConfig("bob", BOB))
    engine = FakeEngine(says("x"))
    async with in_process(engine, api_keys=keys) as client:
        for key, priority in ((ANN, -5), (ANN, -1), (BOB, -1), (BOB, 2), (BOB, 1000), (ANN, 0)):
            reply = await client.post(route, json=body | {"priority": priority}, headers=of(key))
            assert reply.status_code == 200
            assert ("priority" in reply.headers.get("x-aerie-ignored", "")) is (
                (key, priority) in ((ANN, -5), (BOB, 1000), (BOB, -1))
            )
        strict = await client.post(route, json=body | {"priority": 3}, headers=of(BOB))
        assert "x-aerie-ignored" not in strict.headers
    owners = [msgspec.structs.replace(call.owner, request_id="") for call in engine.calls]
    assert owners[:6] == [
        Owner("ann", 3.0, -2),
        Owner("ann", 3.0, -1),
        Owner("bob", 1.0, 0),
        Owner("bob", 1.0, 2),
        Owner("bob", 1.0, 100),
        Owner("ann", 3.0, 0),
    ]


async def test_usage_is_counted_and_logged_by_name(caplog: pytest.LogCaptureFixture) -> None:
    keys = (KeyConfig("ann", ANN, admin=True), KeyConfig("bob", BOB, requests_per_minute=1))
    engine = FakeEngine(says("ab", "c", cached_tokens=1))
    with caplog.at_level("INFO", "aerie.requests"):
        async with in_process(engine, api_keys=keys) as client:
            for key in (ANN, ANN, BOB, BOB):
                await client.post(TEXT, json=PROMPT, headers=of(key))
            await client.post(TEXT, json=PROMPT, headers=of("unknown-key-x"))
            all_keys = (await client.get("/metrics", headers=of(ANN))).text
            own = (await client.get("/metrics", headers=of(BOB))).text
    lines = [line for line in all_keys.splitlines() if line.startswith("aerie:key_")]
    found = {(line[6:].split("{")[0], line.split('key="')[1][:3]): float(line.split()[-1]) for line in lines}
    assert found[("key_requests_total", "ann")] == 2 == found[("key_requests_total", "bob")]
    assert found[("key_limited_total", "bob")] == 1 and found[("key_limited_total", "ann")] == 0
    assert found[("key_prompt_tokens_total", "ann")] == 2 * len(engine.calls[0].prompt)
    assert found[("key_cached_tokens_total", "ann")] == 2 and found[("key_output_tokens_total", "bob")] == 4
    assert 'key="bob"' in own and 'key="ann"' not in own, "a key sees its own"
    lines = [MarkedFormatter("ingress").format(record) for record in caplog.records if record.name == "aerie.requests"]
    assert len(lines) == 4 and ANN not in str(lines)
    assert re.search(
        r"ended: path=/v1/completions status=200 seconds=\S+ key=ann prompt_tokens=\d+ cached_tokens=1 "
        r"output_tokens=4 finish=stop$",
        lines[0],
    )
    assert "status=429 reason=rate_limit_exceeded" in lines[3] and "key=bob" in lines[3]
