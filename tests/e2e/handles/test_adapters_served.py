"""LoRA adapters over HTTP, with two engines: chosen by `model`, loaded and unloaded beside running streams, and loaded
again by engines that are built later."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
from transformers import AutoTokenizer

from tests.e2e.checkpoint import make_checkpoints
from tests.e2e.serving import Server, actor_pids, engine_stats, serving
from tests.support.targets.adapters import make_adapter, merged_tokens

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]
ROOT = {"Authorization": "Bearer " + "r" * 20}
PROMPT, NUM_TOKENS = "the quick brown fox", 16
NAMES = ("a", "b")


class Served:
    """A server, the folders of adapters, and the tokens that each gives; "": the model alone."""

    def __init__(self, server: Server, target: Path, adapters: dict[str, Path]) -> None:
        self.server, self.adapters = server, adapters
        ids = AutoTokenizer.from_pretrained(target)(PROMPT)["input_ids"]
        self.expected = {
            name: merged_tokens(target, path, [ids], NUM_TOKENS, -1)[0] for name, path in {"": None, **adapters}.items()
        }

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.server.url}/v1", api_key="r" * 20, max_retries=0, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.server.url}{path}", json=body, headers=ROOT, timeout=60)

    async def tokens(self, client: openai.AsyncOpenAI, model: str) -> list[int]:
        """Stream an answer; return its tokens."""
        found: list[int] = []
        extra = {"ignore_eos": True, "return_token_ids": True}
        settings: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "extra_body": extra}
        async for event in await client.completions.create(model=model, prompt=PROMPT, stream=True, **settings):
            for choice in event.choices:
                found += (choice.model_extra or {}).get("token_ids") or []
        return found


@pytest.fixture(scope="module")
def served(ray_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    target, draft = make_checkpoints(folder)
    adapters = {name: make_adapter(folder / name, target, seed) for seed, name in enumerate(NAMES)}
    args: dict[str, Any] = {
        "model": {"path": str(target), "device": "cpu"},
        "speculative": {"path": str(draft), "num_steps": 3, "num_draft_tokens": 4, "adaptive": False},
        "cache": {"num_pages": 400},
        "scheduler": {"max_running": 8},
        "parallel": {"tensor_parallel": 1, "replicas": 2},
        "lora": {"modules": {"a": str(adapters["a"])}, "max_loras": 1},
        "ingress": {"api_keys": [{"name": "root", "key": "r" * 20, "admin": True}]},
    }
    with serving(ray_port, args, folder) as running:
        yield Served(running, target, adapters)


async def test_adapters_come_and_go_beside_streams(served: Served) -> None:
    async with served.client() as client:
        assert [model.id for model in (await client.models.list()).data] == ["target", "a"]
        streams = [served.tokens(client, model) for model in ("target", "a", "target:a", "default") * 3]
        running = asyncio.gather(*streams)
        await asyncio.sleep(0.05)
        body = {"lora_name": "b", "lora_path": str(served.adapters["b"])}
        loaded = await asyncio.to_thread(served.post, "/v1/load_lora_adapter", **body)
        assert loaded.status_code == 200, loaded.text
        again = await asyncio.to_thread(served.post, "/v1/load_lora_adapter", **body)
        assert again.status_code == 400 and "is loaded already" in again.text
        of_b = asyncio.gather(*(served.tokens(client, "b") for _ in range(6)))
        cards = {model.id: model.model_dump() for model in (await client.models.list()).data}
        assert (cards["b"]["parent"], cards["b"]["root"]) == ("target", str(served.adapters["b"]))
        gone = await asyncio.to_thread(served.post, "/v1/unload_lora_adapter", lora_name="a")
        assert gone.status_code == 200
        with pytest.raises(openai.NotFoundError, match="The model 'a' does not exist"):
            await served.tokens(client, "a")
        names = ("", "a", "a", "") * 3
        assert await running == [served.expected[name] for name in names]
        assert await of_b == [served.expected["b"]] * 6


async def served_by_new_engines(served: Served, client: openai.AsyncOpenAI, former: set[int]) -> None:
    """Wait until both engines are new, and have the same adapters."""
    deadline = time.monotonic() + 240
    while True:
        stats: list[tuple[str, set[str]]] = []
        with contextlib.suppress(ray.exceptions.RayError):  # of an actor that has just been killed
            stats = [(each.status, {*each.rounds_by_adapter}) for each in await asyncio.to_thread(engine_stats)]
        if stats == [("ready", {"b"})] * 2 and not former & set(actor_pids("EagleCoordinator")):
            break
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.2)
    assert await asyncio.gather(*(served.tokens(client, "b") for _ in range(4))) == [served.expected["b"]] * 4


@pytest.mark.slow
@pytest.mark.timeout(900)  # an engine starts within 15 s on a free machine
async def test_engines_that_are_built_later_have_the_adapters_of_those_before(served: Served) -> None:
    """A coordinator is lost, then the other one, then both engines at once."""
    async with served.client() as client:
        body = {"lora_name": "b", "lora_path": str(served.adapters["b"]), "load_inplace": True}
        assert (await asyncio.to_thread(served.post, "/v1/load_lora_adapter", **body)).status_code == 200
        await asyncio.to_thread(served.post, "/v1/unload_lora_adapter", lora_name="a")
        coordinators = actor_pids("EagleCoordinator")
        for victims in ([coordinators[0]], [coordinators[1]], actor_pids("ServeReplica:aerie:Engine")):
            former = {*victims} if victims[0] in coordinators else {*actor_pids("EagleCoordinator")}
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            await served_by_new_engines(served, client, former)
            with pytest.raises(openai.NotFoundError, match="The model 'a' does not exist"):
                await served.tokens(client, "a")
