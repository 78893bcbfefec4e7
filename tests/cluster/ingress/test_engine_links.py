"""Links to real coordinators over ZeroMQ, scripted ranks in threads: requests, choice, losses. No Ray."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path

import pytest

from cluster.ingress import engine_links
from cluster.ingress.engine_link import EngineLostError
from cluster.ingress.engine_links import EngineLinks
from cluster.ingress.routing import Prompt
from cluster.transport.messages import GenerateRequest, GenerateSummary, Probe
from tests.support.cluster import TIMEOUT_S, TestBed
from tests.support.scripted import scripted_output
from workers.scheduling.plan import SamplingParams, pack_i32

NOBODY: frozenset[str] = frozenset()
PROMPT = list(range(40))


class Rig:
    """Two engines behind one ingress's links; found: what the search for them says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_links, "FIND_PERIOD_S", 0.02)
        self.beds = {}
        for name in ("a", "b"):
            (folder / name).mkdir()
            self.beds[name] = TestBed(folder / name, delay_s=0.005)
            self.beds[name].attach()
        self.found = {name: bed.coordinator.endpoint for name, bed in self.beds.items()}
        bed = self.beds["a"]
        self.links = EngineLinks(bed.context, bed.transport, self._find, seed=1)

    async def _find(self, known: Collection[str]) -> Mapping[str, str]:
        return {name: "" if name in known else endpoint for name, endpoint in self.found.items()}

    def request(self, name: str, request_id: str, max_tokens: int = 10) -> GenerateRequest:
        reply_to = self.beds[name].ingress.endpoint
        return GenerateRequest(request_id, pack_i32(PROMPT), SamplingParams(max_tokens), reply_to)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def both(self) -> None:
        views = lambda: [link.view for link in self.links._links.values()]  # noqa: E731
        await self.until(lambda: len(views()) == 2 and all(view.state is not None for view in views()))


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path, monkeypatch)
    yield rig
    rig.links.close()
    for bed in rig.beds.values():
        bed.close()


async def test_a_request_runs_on_the_engine_that_was_chosen_and_its_pages_are_known_then(rig: Rig) -> None:
    await rig.both()
    prompt = Prompt(PROMPT, b"")
    name = await rig.links.choose(prompt, NOBODY, TIMEOUT_S)
    assert name is not None
    answer = await asyncio.wait_for(rig.links.start(name, rig.request(name, "r"), prompt), TIMEOUT_S)
    assert isinstance(answer, GenerateSummary) and (answer.finish, answer.num_output_tokens) == ("length", 10)
    ingress = rig.beds[name].ingress
    ingress.read_end("r")
    assert ingress.tokens("r") == scripted_output(len(PROMPT), SamplingParams(10))
    view = rig.links._links[name].view
    view._promised.clear()
    await rig.until(lambda: view.num_cached(prompt) == 36)
    assert {await rig.links.choose(prompt, NOBODY, 0.0) for _ in range(10)} == {name}
    await rig.until(lambda: view.num_active == 0)
    assert not rig.beds[name].coordinator.flush_cache().unfinished
    await rig.until(lambda: view.num_cached(prompt) == 0)


async def test_cancelling_a_request_aborts_it(rig: Rig) -> None:
    await rig.both()
    call = rig.links.start("a", rig.request("a", "r", 300), Prompt(PROMPT, b""))
    coordinator = rig.beds["a"].coordinator
    await rig.until(lambda: coordinator.stats().num_running == 1)
    call.cancel()
    await rig.until(lambda: coordinator.stats().num_running == 0)


async def test_a_lost_coordinator_ends_its_requests_and_is_not_chosen(rig: Rig) -> None:
    await rig.both()
    call = rig.links.start("a", rig.request("a", "r", 300), Prompt(PROMPT, b""))
    await rig.until(lambda: rig.beds["a"].coordinator.stats().num_running == 1)
    del rig.found["a"]
    rig.beds["a"].coordinator._loop.streams._inbox.send = lambda *message: None  # it says nothing more
    rig.beds["a"].coordinator.stop()
    with pytest.raises(EngineLostError):
        await asyncio.wait_for(call, TIMEOUT_S)
    assert await rig.links.choose(Prompt(PROMPT, b""), NOBODY, 0.0) == "b"
    assert await rig.links.choose(Prompt(PROMPT, b""), frozenset("b"), 0.05) is None


async def test_who_waits_for_an_engine_gets_the_one_that_comes(rig: Rig) -> None:
    await rig.both()
    endpoint = rig.found.pop("b")
    await rig.until(lambda: len(rig.links._links) == 1)
    waiting = asyncio.create_task(rig.links.choose(Prompt(PROMPT, b""), frozenset("a"), TIMEOUT_S))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    rig.found["b"] = endpoint
    assert await waiting == "b"


async def test_an_engine_that_leaves_lets_its_requests_end_and_gets_no_new_ones(rig: Rig) -> None:
    await rig.both()
    coordinator = rig.beds["a"].coordinator
    call = rig.links.start("a", rig.request("a", "r", 100), Prompt(PROMPT, b""))
    await rig.until(lambda: coordinator.stats().num_running == 1)
    leaving = asyncio.create_task(asyncio.to_thread(coordinator.drain, TIMEOUT_S, True))
    await rig.until(lambda: coordinator.stats().status == "draining")
    refusal = await asyncio.wait_for(rig.links.start("a", rig.request("a", "late"), Prompt(PROMPT, b"")), TIMEOUT_S)
    assert getattr(refusal, "kind", "") == "leaving"
    assert {await rig.links.choose(Prompt(PROMPT, b""), NOBODY, 0.0) for _ in range(20)} == {"b"}
    answer = await asyncio.wait_for(call, TIMEOUT_S)
    assert isinstance(answer, GenerateSummary) and answer.num_output_tokens == 100 and await leaving


async def test_the_successor_of_an_engine_that_left_is_waited_for(rig: Rig) -> None:
    """An update replaces an engine in the time of a start, in which nobody is to be turned away."""
    await rig.both()
    endpoint = rig.found.pop("b")
    await rig.until(lambda: len(rig.links._links) == 1)
    prompt = Prompt(PROMPT, b"")
    assert await asyncio.to_thread(rig.beds["a"].coordinator.drain, TIMEOUT_S, True)
    await rig.until(lambda: (state := rig.links._links["a"].view.state) is not None and state.is_leaving)
    waiting = asyncio.create_task(rig.links.choose(prompt, NOBODY, 0.05))
    del rig.found["a"]
    await rig.until(lambda: not rig.links._links)
    later = asyncio.create_task(rig.links.choose(prompt, frozenset("a"), 0.05))
    await asyncio.sleep(0.2)
    assert not waiting.done() and not later.done()
    assert await rig.links.choose(prompt, NOBODY, 0.0) is None  # who does not want to wait need not
    rig.found["b"] = endpoint
    assert await asyncio.wait_for(asyncio.gather(waiting, later), TIMEOUT_S) == ["b", "b"]


async def test_no_engine_is_waited_for_once_the_server_ends(rig: Rig) -> None:
    """An ingress that begins waits for an engine; not one whose server ends."""
    del rig.found["b"]
    await rig.until(lambda: list(rig.links._links) == ["a"] and rig.links._links["a"].view.state is not None)
    assert rig.beds["a"].coordinator.drain(TIMEOUT_S)
    await rig.until(lambda: rig.links._links["a"].view.state.status == "draining")
    del rig.found["a"]
    await rig.until(lambda: not rig.links._links)
    async with asyncio.timeout(1.0):
        assert await rig.links.choose(Prompt(PROMPT, b""), NOBODY, TIMEOUT_S) is None


async def test_a_probe_takes_a_requests_way(rig: Rig) -> None:
    await rig.both()
    reply_to = rig.beds["b"].ingress.endpoint
    answer = await asyncio.wait_for(rig.links.start("b", Probe("p", reply_to), Prompt((), b"")), TIMEOUT_S)
    assert isinstance(answer, GenerateSummary) and answer.finish == "stop"
    assert rig.beds["b"].ingress.read_end("p").finish == "stop"
