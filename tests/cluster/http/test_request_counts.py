"""/metrics says how requests ended at this ingress: by route, status and reason."""

import asyncio

import httpx
from prometheus_client.parser import text_string_to_metric_families

from aerie.cluster.http.engine_client import EngineRefused
from aerie.cluster.transport.messages import EngineStats, Refusal, TokenDelta
from tests.support.edge_client import CHAT, HELLO, MODEL, events, in_process, served
from tests.support.fake_engine import FakeEngine, Step, says

TEXT = "/v1/completions"
PROMPT = {"model": MODEL, "prompt": "hi"}


def _ended(text: str) -> dict[tuple[str, str, str], float]:
    """Requests by route, status and reason; their other labels are checked."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found, ingresses = {}, set()
    for sample in families["aerie:http_requests"].samples:
        assert sample.labels["model_name"] == MODEL
        ingresses.add(sample.labels["ingress"])
        found[sample.labels["route"], sample.labels["status"], sample.labels["reason"]] = sample.value
    assert len(ingresses) <= 1
    return found


async def test_every_end_is_counted_with_its_reason() -> None:
    def script(prompt: list[int], sampling: object) -> list[Step]:
        match len(engine.calls):
            case 1 | 2:
                return [TokenDelta("", (1,)), TokenDelta("", (), "length")]
            case 3:
                return [EngineRefused(Refusal("queue_full", "full"))]
            case 4:
                return [TokenDelta("", (1,)), TokenDelta("", (), "error", error="gone")]
        return [EngineRefused(Refusal("not_ready", "starting"))]

    engine = FakeEngine(script)
    async with in_process(engine) as client:
        for _ in range(3):
            await client.post(TEXT, json=PROMPT)
        broken = await client.post(TEXT, json=PROMPT | {"stream": True})
        assert "error" in events(broken.text)[-1] and broken.status_code == 200
        await client.post(CHAT, json=HELLO)
        await client.post(TEXT, json={"model": MODEL})
        await client.get("/one/of/many/paths")
        await client.get("/another")
        await client.post("/health")
        ended = _ended((await client.get("/metrics")).text)
    assert ended == {
        (TEXT, "200", ""): 2,
        (TEXT, "429", "server_overloaded"): 1,
        (TEXT, "200", "engine_error"): 1,
        (CHAT, "503", "service_unavailable"): 1,
        (TEXT, "400", "missing_required_parameter"): 1,
        ("other", "404", "not_found"): 2,
        ("/health", "405", "method_not_allowed"): 1,
    }


async def test_client_that_leaves_is_counted_with_what_it_had_been_told() -> None:
    engine = FakeEngine(lambda p, s: [TokenDelta("", (1,)), 60.0])
    async with served(engine) as url, httpx.AsyncClient() as client:
        async with client.stream("POST", f"{url}{TEXT}", json=PROMPT | {"stream": True}) as stream:
            await anext(stream.aiter_lines())
        key = (TEXT, "200", "client_left")
        while key not in (ended := _ended((await client.get(f"{url}/metrics")).text)):
            await asyncio.sleep(0.01)
    assert ended[key] == 1
    assert engine.num_active == 0


async def test_engines_without_an_answer_leave_the_counts() -> None:
    engine = FakeEngine(says("a"), [EngineStats("engine-0", "dead")])
    async with in_process(engine, api_keys=("a-long-key",)) as client:
        assert (await client.post(TEXT, json=PROMPT)).status_code == 401
        text = (await client.get("/metrics", headers={"authorization": "Bearer a-long-key"})).text
    assert _ended(text) == {(TEXT, "401", "invalid_api_key"): 1}
