"""Links to real coordinators over ZeroMQ, scripted ranks in threads: requests, choice, losses. No Ray."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from unittest.mock import Mock

import pytest
import zmq

from aerie.cluster.http.engine_client import EngineRefused
from aerie.cluster.ingress import attempts, engine_links
from aerie.cluster.ingress.attempts import EngineFailed, RequestStream
from aerie.cluster.ingress.engine_links import EngineLink, EngineLinks
from aerie.cluster.ingress.remote_engines import RemoteEngines
from aerie.cluster.ingress.routing import Prompt
from aerie.cluster.transport.channel import Inbox, IngressLink
from aerie.cluster.transport.encoding import decode
from aerie.cluster.transport.messages import Abort, EngineState, GenerateRequest, Probe, Refused, TokenBatch, TokenDelta
from aerie.cluster.transport.sockets import Transport
from aerie.workers.scheduling.plan import SamplingParams, pack_i32
from tests.support.cluster import TIMEOUT_S, TestBed
from tests.support.scripted import scripted_output
from tests.support.slow import slow

NOBODY: frozenset[str] = frozenset()
PROMPT = list(range(40))


class Rig:
    """Two engines behind one ingress's links; found: what the search for them says. identities: of the engines."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, identities: str = "11") -> None:
        monkeypatch.setattr(engine_links, "FIND_PERIOD_S", 0.02)
        self.beds = {}
        for name, identity in zip("ab", identities, strict=True):
            (folder / name).mkdir()
            self.beds[name] = TestBed(folder / name, delay_s=0.005, identity=identity)
            self.beds[name].attach()
        self.found = {name: bed.coordinator.endpoint for name, bed in self.beds.items()}
        bed = self.beds["a"]
        self.links = EngineLinks(bed.context, bed.transport, self._find, identity="1", seed=1)

    async def _find(self, known: Collection[str]) -> Mapping[str, str]:
        return {name: "" if name in known else endpoint for name, endpoint in self.found.items()}

    def start(self, name: str, request_id: str, max_tokens: int = 10) -> RequestStream:
        request = GenerateRequest(request_id, pack_i32(PROMPT), SamplingParams(max_tokens))
        return self.links.start(name, request, Prompt(PROMPT, b""))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def both(self) -> None:
        views = lambda: [link.view for link in self.links._links.values()]  # noqa: E731
        await self.until(lambda: len(views()) == 2 and all(view.state is not None for view in views()))


async def read(stream: RequestStream) -> TokenDelta:
    """The whole answer as one delta; raises what the stream fails with."""
    tokens: list[int] = []
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            delta = stream.take("client")
            if delta is None:
                if stream.failure is not None:
                    raise stream.failure
                await stream.changed.wait()
                continue
            tokens += delta.tokens
            if delta.finish is not None:
                return TokenDelta("client", tuple(tokens), delta.finish, error=delta.error)


@pytest.fixture(params=["11"])
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path, monkeypatch, request.param)
    yield rig
    rig.links.close()
    for bed in rig.beds.values():
        bed.close()


async def test_a_request_runs_on_the_engine_that_was_chosen_and_its_pages_are_known_then(rig: Rig) -> None:
    await rig.both()
    prompt = Prompt(PROMPT, b"")
    name = await rig.links.choose(prompt, NOBODY, TIMEOUT_S)
    assert name is not None
    answer = await read(rig.start(name, "r"))
    assert answer.finish == "length" and list(answer.tokens) == scripted_output(len(PROMPT), SamplingParams(10))
    view = rig.links._links[name].view
    view._promised.clear()
    await rig.until(lambda: view.num_cached(prompt) == 36)
    assert {await rig.links.choose(prompt, NOBODY, 0.0) for _ in range(10)} == {name}
    await rig.until(lambda: view.num_active == 0)
    assert not rig.beds[name].coordinator.flush_cache().unfinished
    await rig.until(lambda: view.num_cached(prompt) == 0)


async def test_closing_a_stream_aborts_its_request(rig: Rig) -> None:
    await rig.both()
    stream = rig.start("a", "r", 300)
    coordinator = rig.beds["a"].coordinator
    await rig.until(lambda: coordinator.stats().num_running == 1)
    stream.close()
    await rig.until(lambda: coordinator.stats().num_running == 0)


async def test_an_engine_that_stops_says_how_its_requests_ended_before_its_connection_closes(rig: Rig) -> None:
    await rig.both()
    streams = [rig.start("a", f"r{i}", 300) for i in range(3)]
    await rig.until(lambda: rig.beds["a"].coordinator.stats().num_running == 3)
    await asyncio.to_thread(rig.beds["a"].coordinator.stop)
    assert {(await read(stream)).error for stream in streams} == {"the engine was stopped"}


async def test_a_lost_coordinator_ends_its_requests_and_is_not_chosen(rig: Rig) -> None:
    await rig.both()
    stream = rig.start("a", "r", 300)
    await rig.until(lambda: rig.beds["a"].coordinator.stats().num_running == 1)
    rig.beds["a"].coordinator._loop.streams._inbox.send = lambda *message: ""  # it says nothing more
    rig.beds["a"].coordinator.stop()
    with pytest.raises(EngineFailed, match="the coordinator is gone: its connection closed"):
        await read(stream)
    del rig.found["a"]  # not before: the search would end the link for another reason
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
    stream = rig.start("a", "r", 100)
    await rig.until(lambda: coordinator.stats().num_running == 1)
    leaving = asyncio.create_task(asyncio.to_thread(coordinator.drain, TIMEOUT_S, True))
    await rig.until(lambda: coordinator.stats().status == "draining")
    with pytest.raises(EngineRefused, match="^leaving"):
        await read(rig.start("a", "late"))
    assert {await rig.links.choose(Prompt(PROMPT, b""), NOBODY, 0.0) for _ in range(20)} == {"b"}
    assert len((await read(stream)).tokens) == 100 and await leaving


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


@pytest.mark.parametrize("rig", ["12"], indirect=True)
async def test_an_engine_of_another_model_is_not_chosen_and_a_replaced_ingress_waits_for_none(rig: Rig) -> None:
    """While an application is updated, ingresses and engines of two plans run."""
    await rig.both()
    prompt = Prompt(PROMPT, b"")
    assert {await rig.links.choose(prompt, NOBODY, 0.0) for _ in range(20)} == {"a"}
    assert (await read(rig.start("a", "r"))).finish == "length"
    assert await asyncio.to_thread(rig.beds["a"].coordinator.drain, TIMEOUT_S, True)
    await rig.until(lambda: (state := rig.links._links["a"].view.state) is not None and state.is_leaving)
    async with asyncio.timeout(5.0):
        assert await rig.links.choose(prompt, NOBODY, TIMEOUT_S) is None
        del rig.found["a"]
        await rig.until(lambda: list(rig.links._links) == ["b"])
        assert await rig.links.choose(prompt, NOBODY, TIMEOUT_S) is None


@pytest.mark.parametrize("rig", ["12"], indirect=True)
async def test_a_new_ingress_waits_for_an_engine_of_its_own_model(rig: Rig) -> None:
    endpoint = rig.found.pop("a")
    links = EngineLinks(rig.beds["b"].context, rig.beds["b"].transport, rig._find, identity="1")
    await rig.until(lambda: links._foreign == {"b"})
    waiting = asyncio.create_task(links.choose(Prompt(PROMPT, b""), NOBODY, 0.05))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    rig.found["a"] = endpoint
    assert await asyncio.wait_for(waiting, TIMEOUT_S) == "a"
    links.close()


async def test_a_probe_takes_a_requests_way(rig: Rig) -> None:
    await rig.both()
    assert (await read(rig.links.start("b", Probe("p"), Prompt((), b"")))).finish == "stop"


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
async def test_no_token_is_lost_or_doubled_whatever_messages_are_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """An engine cannot send an ingress some of its messages; requests are resumed as often as it takes."""
    chance, num_lost = random.Random(seed), 0
    send = Inbox.send

    def send_or_lose(inbox: Inbox, ingress: IngressLink, message: TokenBatch | Refused | EngineState) -> str:
        nonlocal num_lost
        if chance.random() > 0.03:
            return send(inbox, ingress, message)
        ingress.num_messages += 1
        num_lost += 1
        return "it does not read its messages"

    monkeypatch.setattr(attempts, "RESUMED_ATTEMPTS", 100)
    await rig.both()
    engines = RemoteEngines(rig.links, Mock(), resume=True)
    monkeypatch.setattr(Inbox, "send", send_or_lose)

    async def ask(number: int) -> None:
        sampling, tokens = SamplingParams(100, seed=number), []
        async for delta in engines.generate(PROMPT, sampling, f"q{number}"):
            tokens += delta.tokens
        assert (delta.finish, tokens) == ("length", scripted_output(len(PROMPT), sampling))

    async with asyncio.timeout(6 * TIMEOUT_S):
        await asyncio.gather(*(ask(number) for number in range(12)))
    assert num_lost > 0
    for bed in rig.beds.values():
        await rig.until(lambda: bed.coordinator.stats().kv_usage == 0)  # noqa: B023


class Scripted:
    """A link to an engine that a test plays, which has read nothing but what `start` has sent."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inbox = Inbox(self.context, Transport(folder=str(folder)), "inbox")
        self.link = EngineLink(self.context, Transport(), self.inbox.endpoint)

    async def start(self, *names: str) -> list[RequestStream]:
        streams = [self.link.start(GenerateRequest(name, b"", SamplingParams(9))) for name in names]
        num_read = -1  # the subscription comes first
        async with asyncio.timeout(TIMEOUT_S):
            while num_read < len(names):
                if self.inbox.receive() is None:
                    await asyncio.sleep(0.001)
                else:
                    num_read += 1
        (self.ingress,) = self.inbox.links.values()
        return streams

    def send(self, *deltas: TokenDelta) -> None:
        assert not self.inbox.send(self.ingress, TokenBatch(deltas))


@pytest.fixture
async def scripted(tmp_path: Path) -> AsyncIterator[Scripted]:
    scripted = Scripted(tmp_path)
    yield scripted
    scripted.link.fail("the test is over")
    scripted.inbox.close()
    scripted.context.destroy(linger=0)


async def test_a_lost_message_fails_every_request_of_the_link_and_no_token_after_it_is_read(scripted: Scripted) -> None:
    streams = await scripted.start("a", "b")
    scripted.send(TokenDelta("a", (5,)))
    scripted.ingress.num_messages += 1  # one that could not be sent
    scripted.send(TokenDelta("a", (7,), "stop"), TokenDelta("b", (8,)))
    async with asyncio.timeout(TIMEOUT_S):
        while not scripted.link.lost:
            await asyncio.sleep(0.001)
    first = streams[0].take("a")
    assert first is not None and (first.tokens, first.finish) == ((5,), None)
    assert streams[1].take("b") is None
    assert {str(stream.failure) for stream in streams} == {"message 1 was lost: 2 came"}
    with pytest.raises(EngineFailed, match="was lost"):
        await read(scripted.link.start(GenerateRequest("c", b"", SamplingParams(9))))


async def test_what_was_sent_before_the_engine_died_is_still_read(scripted: Scripted) -> None:
    ended, cut = await scripted.start("ended", "cut")
    for token in range(200):
        scripted.send(TokenDelta("cut", (token,)))
    scripted.send(TokenDelta("ended", (1,), "stop"))
    scripted.inbox.close(1000)
    assert (await read(ended)).tokens == (1,)
    async with asyncio.timeout(TIMEOUT_S):
        while cut.failure is None:
            await asyncio.sleep(0.001)
    rest = cut.take("cut")
    assert rest is not None and rest.tokens == tuple(range(200)) and "the coordinator is gone" in str(cut.failure)


async def test_an_abort_that_the_engine_s_full_queue_refuses_is_sent_once_it_reads_again(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request ran to its last token."""
    streams = await scripted.start("a", "b", "c")
    listener = scripted.link._listener
    with monkeypatch.context() as patch:
        patch.setattr(listener, "send", lambda raw: False)
        for stream in streams[:2]:
            stream.close()
    scripted.send(TokenDelta("c", (5,)))
    read: list[object] = []
    async with asyncio.timeout(TIMEOUT_S):
        while len(read) < 2:
            received = scripted.inbox.receive()
            if received is None:
                await asyncio.sleep(0.001)
            else:
                read.append(decode(received[1]))
    assert read == [Abort("a"), Abort("b")]


async def test_first_tokens_go_before_the_next_tokens_of_others(scripted: Scripted) -> None:
    """Each reader takes a while for its event, and a step's message has the requests that run before a new one's."""
    names = ("old", "older", "new")
    streams = dict(zip(names, await scripted.start(*names), strict=True))
    order: list[str] = []

    async def read(name: str) -> None:
        while True:
            await streams[name].changed.wait()
            assert streams[name].take(name) is not None
            order.append(name)

    readers = [asyncio.create_task(read(name)) for name in streams]
    scripted.link._deliver(TokenBatch((TokenDelta("old", (1,)), TokenDelta("older", (1,)))))
    await asyncio.sleep(0.01)
    order.clear()
    batch = (
        TokenDelta("old", (2,)),
        TokenDelta("older", (2,)),
        TokenDelta("new", (1,)),
        TokenDelta("new", (2,), "stop"),
    )
    scripted.link._deliver(TokenBatch(batch))
    await asyncio.sleep(0.01)
    assert order == ["new", "old", "older"]
    for reader in readers:
        reader.cancel()
