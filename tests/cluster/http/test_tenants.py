"""Requests of one API key and those of another: what they share, and what they do not."""

import itertools
from typing import Any

import httpx
import pytest

from aerie.cluster.http.keys import KeyConfig
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
    found = [tenants.of_key(key) for key in (ANN, BOB, "unknown", "")]
    assert [tenant and tenant.name for tenant in found] == ["ann", "bob", None, None]
    assert next(counts) == 4 * len(KEYS)
