"""The application below a path prefix: Serve's `route_prefix`, or `http_options.root_path` behind a proxy that strips
it. Either way the scope's path begins with its root path."""

import re
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest

from aerie.cluster.http.app import build_app
from aerie.cluster.http.middleware import OPEN_ROUTES, QUIET_ROUTES
from tests.support.edge_client import CHAT, HELLO, RESPONSES, edge_config
from tests.support.fake_engine import FakeEngine, chat_tokenizer, says

KEY = "secret-key-1"
PROBES = ("/health", "/health/live", "/health/ready", "/ping", "/health_generate")
prefixes = pytest.mark.parametrize("prefix", ["", "/chat", "/team/a.b"])


def _client(prefix: str, **config: Any) -> httpx.AsyncClient:
    app = build_app(edge_config(**config), chat_tokenizer(), FakeEngine(says("x")))
    transport = httpx.ASGITransport(app, root_path=prefix)
    return httpx.AsyncClient(transport=transport, base_url=f"http://chat.example.com{prefix}")


@prefixes
async def test_probes_and_the_page_need_neither_key_nor_host(prefix: str) -> None:
    async with _client(prefix) as client:
        for path in QUIET_ROUTES:
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/v1/models")).json()["error"]["code"] == "host_not_allowed"
    async with _client(prefix, api_keys=(KEY,)) as client:
        assert set(PROBES) < OPEN_ROUTES
        for path in OPEN_ROUTES:
            assert (await client.get(path)).status_code == 200, path
        for path in ("/v1/models", "/metrics", prefix + "/health"):
            assert (await client.get(path)).status_code == (401 if prefix or path != "/health" else 200), path
        assert (await client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})).status_code == 200


@prefixes
async def test_metrics_name_routes_without_the_prefix(prefix: str) -> None:
    async with _client(prefix, api_keys=(KEY,)) as client:
        keyed = {"authorization": f"Bearer {KEY}"}
        assert (await client.post(CHAT, json=HELLO, headers=keyed)).status_code == 200
        assert (await client.post(CHAT, json=HELLO)).status_code == 401
        await client.get("/v1/nothing", headers=keyed)
        text = (await client.get("/metrics", headers=keyed)).text
    counted = re.findall(r'aerie:http_requests_total{.*reason="(\w*)",route="(\S+?)",status="(\d+)"} (\S+)', text)
    assert sorted(counted) == [
        ("", CHAT, "200", "1.0"),
        ("invalid_api_key", CHAT, "401", "1.0"),
        ("not_found", "other", "404", "1.0"),
    ]


@prefixes
async def test_every_link_of_the_page_and_of_the_documents_stays_below_the_prefix(prefix: str) -> None:
    async with _client(prefix, allowed_hosts=("*",)) as client:
        home = await client.get(f"http://chat.example.com{prefix}", follow_redirects=True)
        assert home.status_code == 200 and str(home.url).rstrip("/") == f"http://chat.example.com{prefix}"
        docs = await client.get("/docs")
        links = [
            urljoin(str(page.url), link)
            for page in (home, docs)
            for link in re.findall(r'(?:href|src)="([^#"]+)"', page.text)
        ]
        assert len(links) > 4
        for link in links:
            assert (await client.get(link)).status_code == 200, link
        document = (await client.get("/openapi.json")).json()
        served = urljoin("http://chat.example.com/openapi.json", document.get("servers", [{"url": ""}])[0]["url"])
        assert served.removesuffix("/openapi.json").rstrip("/") == f"http://chat.example.com{prefix}"


@prefixes
async def test_stored_replies_are_found_below_the_prefix(prefix: str) -> None:
    async with _client(prefix, allowed_hosts=("*",)) as client:
        made = (await client.post(RESPONSES, json={"input": "hi"})).json()
        assert (await client.get(f"{RESPONSES}/{made['id']}")).json() == made


async def test_a_path_that_only_begins_like_the_prefix_is_not_below_it() -> None:
    """Starlette routes it as it is, and so its key is checked as it is."""
    async with _client("/chat", api_keys=(KEY,)) as client:
        assert (await client.get("http://chat.example.com/chatty/health")).status_code == 401
        assert (await client.get("http://chat.example.com/health")).status_code == 200
