"""LoRA adapters over HTTP: which requests have them, how they are listed, and vLLM's routes that load them."""

from typing import Any

import pytest

from aerie.cluster.http.keys import KeyConfig
from aerie.cluster.transport.admin import AdminCall, AdminOutcome, LoadLora, UnloadLora
from tests.support.edge_client import in_process
from tests.support.fake_engine import FakeEngine, says

KEYS = (KeyConfig("root", "r" * 20, admin=True), KeyConfig("user", "u" * 20))
ROOT, USER = ({"Authorization": f"Bearer {letter * 20}"} for letter in "ru")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MODEL = "tiny"


class Adapting(FakeEngine):
    """Engines; the second one refuses adapters whose path has "odd" in it, others of them start."""

    def __init__(self) -> None:
        super().__init__(says("x"), known_adapters={"sql": "/adapters/sql"})
        self.asked: list[AdminCall] = []
        self.is_starting = False

    async def administer(self, call: AdminCall) -> list[AdminOutcome]:
        self.asked.append(call)
        if isinstance(call, UnloadLora) and self.known_adapters.pop(call.name, None) is None:
            return [AdminOutcome(name, error=f"adapter={call.name}: is not loaded") for name in "ab"]
        if isinstance(call, LoadLora):
            self.known_adapters[call.name] = call.path
            if "odd" in call.path:
                return [
                    AdminOutcome("a", num_ranks=1),
                    AdminOutcome("b", num_ranks=1, error=f"adapter {call.path}: does not fit"),
                    AdminOutcome("c", error="the engine is starting"),
                ]
            if self.is_starting:
                return [AdminOutcome(name, error="the engine is starting") for name in "ab"]
        return [AdminOutcome("a", num_ranks=1), AdminOutcome("b", error="the engine is starting")]


def server(engine: FakeEngine, **settings: Any) -> Any:
    return in_process(engine, served_model_name=MODEL, serves_adapters=True, **settings)


@pytest.mark.parametrize(("model", "adapter"), [(MODEL, ""), ("sql", "sql"), (f"{MODEL}:sql", "sql"), (None, "")])
async def test_the_model_names_the_adapter(model: str | None, adapter: str) -> None:
    engine = Adapting()
    async with server(engine) as client:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            reply = await client.post(path, json=body | ({} if model is None else {"model": model}))
            assert reply.status_code == 200, reply.text
            assert reply.json()["model"] == (adapter or MODEL)
    assert [call.sampling.adapter for call in engine.calls] == [adapter, adapter]


async def test_unknown_models_are_404_with_and_without_adapters() -> None:
    for engine in (Adapting(), FakeEngine(says("x"))):
        async with in_process(engine, served_model_name=MODEL, serves_adapters=isinstance(engine, Adapting)) as client:
            for name in ("sq", f"{MODEL}:sq", "other:sql"):
                reply = await client.post("/v1/completions", json={"prompt": "a", "model": name})
                assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
            assert not engine.calls


async def test_adapters_are_listed_beside_their_model() -> None:
    async with server(Adapting()) as client:
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        assert cards.keys() == {MODEL, "sql"}
        assert (cards[MODEL]["root"], cards[MODEL]["parent"]) == (MODEL, None)
        assert (cards["sql"]["root"], cards["sql"]["parent"]) == ("/adapters/sql", MODEL)
        assert (await client.get("/v1/models/sql")).json() == cards["sql"]
        assert (await client.get("/v1/models/sq")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body"), [(LOAD, {"lora_name": "n", "lora_path": "/n"}), (UNLOAD, {"lora_name": "sql"})]
)
async def test_only_administrators_load_and_unload(path: str, body: dict[str, str]) -> None:
    engine = Adapting()
    async with server(engine) as client:
        assert (await client.post(path, json=body)).status_code == 403
    async with server(engine, api_keys=KEYS) as client:
        assert (await client.post(path, json=body, headers=USER)).status_code == 403
        assert not engine.asked
        reply = await client.post(path, json=body, headers=ROOT)
        assert reply.status_code == 200 and reply.json()["message"].startswith("Success: LoRA adapter '")


async def test_an_adapter_that_one_engine_refuses_is_taken_from_the_others() -> None:
    engine = Adapting()
    async with server(engine, api_keys=KEYS) as client:
        reply = await client.post(LOAD, json={"lora_name": "n", "lora_path": "/odd"}, headers=ROOT)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == "b: adapter /odd: does not fit"
    assert engine.asked == [LoadLora("n", "/odd"), UnloadLora("n")]
    assert engine.known_adapters.keys() == {"sql"}


async def test_engines_that_start_are_not_waited_for_unless_all_do() -> None:
    engine = Adapting()
    async with server(engine, api_keys=KEYS) as client:
        body = {"lora_name": "n", "lora_path": "/n"}
        assert (await client.post(LOAD, json=body, headers=ROOT)).status_code == 200
        engine.is_starting = True
        reply = await client.post(LOAD, json=body | {"lora_name": "m"}, headers=ROOT)
        assert reply.status_code == 503 and "the engine is starting" in reply.text


async def test_faulty_calls_are_refused() -> None:
    engine = Adapting()
    async with server(engine, api_keys=KEYS) as client:
        unknown = await client.post(UNLOAD, json={"lora_name": "other"}, headers=ROOT)
        assert unknown.status_code == 404
        own = await client.post(LOAD, json={"lora_name": MODEL, "lora_path": "/n"}, headers=ROOT)
        assert own.status_code == 400 and "the model's own name" in own.json()["error"]["message"]
        again = await client.post(LOAD, json={"lora_name": "sql", "lora_path": "/n"}, headers=ROOT)
        assert again.status_code == 400 and "is loaded already" in again.json()["error"]["message"]
        for body in ({}, {"lora_name": "n"}, {"lora_name": "", "lora_path": "/n"}, {"lora_name": 3, "lora_path": "/n"}):
            assert (await client.post(LOAD, json=body, headers=ROOT)).status_code == 400
    assert engine.asked == [UnloadLora("other")]
