"""The ingress's engine client: streams, slow readers, refusals, engines that die. No Ray."""

import asyncio
import tracemalloc

import pytest

from aerie.cluster.http.engine_client import EngineRefused
from aerie.cluster.ingress import remote_engines
from aerie.cluster.ingress.attempts import EngineFailed, RequestStream
from aerie.cluster.ingress.remote_engines import RemoteEngines
from aerie.cluster.ingress.routing import Prompt
from aerie.cluster.transport.messages import EngineStats, FlushOutcome, GenerateRequest, Probe, Refusal, TokenDelta
from aerie.workers.scheduling.plan import PromptLogprobs, SamplingParams, unpack_i32


class ScriptedEngines:
    """Records what was sent to engines; a test fills the streams. present: the engines that can be chosen, the first
    one first; waits: who chose while there was none, and for how long; closed: the streams that were closed."""

    def __init__(self) -> None:
        self.present = ["e"]
        self.waits: list[float] = []
        self.suspected: list[str] = []
        self.stuck: set[str] = set()
        self.engines: list[str] = []
        self.requests: list[GenerateRequest] = []
        self.streams: list[RequestStream] = []
        self.closed: list[RequestStream] = []
        self.started = asyncio.Event()
        self.num_stats = 0
        self.status = "ready"
        self.probes: list[Probe] = []
        self.probe_streams: list[RequestStream] = []

    async def choose(self, prompt: Prompt, avoid: frozenset[str], wait_s: float) -> str | None:
        name = next((name for name in self.present if name not in avoid), None)
        if name is None:
            self.waits.append(wait_s)
        return name

    def start(self, name: str, message: GenerateRequest | Probe, prompt: Prompt) -> RequestStream:
        stream = RequestStream(self.closed.append)
        if isinstance(message, Probe):
            self.probes.append(message)
            self.probe_streams.append(stream)
        else:
            self.engines.append(name)
            self.requests.append(message)
            self.streams.append(stream)
            self.started.set()
        return stream

    def suspect(self, name: str) -> None:
        self.suspected.append(name)

    def is_stuck(self, name: str) -> bool:
        return name in self.stuck

    async def stats(self) -> list[EngineStats]:
        self.num_stats += 1
        return [EngineStats(engine_id="e", status=self.status)]

    async def flush_cache(self) -> list[FlushOutcome]:
        return []


class Rig:
    def __init__(self, resume: bool = True) -> None:
        self.calls = ScriptedEngines()
        self.engines = RemoteEngines(self.calls, self.calls, resume)

    def send(self, index: int, *tokens: int, finish: str | None = None) -> None:
        self.calls.streams[index].put(TokenDelta(self.calls.requests[index].request_id, tokens, finish))

    def send_prompt(self, index: int, part: PromptLogprobs) -> None:
        self.calls.streams[index].put(TokenDelta(self.calls.requests[index].request_id, (), prompt_logprobs=(part,)))

    def refuse(self, index: int, refusal: Refusal) -> None:
        self.calls.streams[index].fail(EngineRefused(refusal))

    def lose(self, index: int, reason: str = "the coordinator died") -> None:
        self.calls.streams[index].fail(EngineFailed(reason, had_taken=True))

    async def call_started(self, count: int) -> None:
        while len(self.calls.streams) < count:
            self.calls.started.clear()
            await asyncio.wait_for(self.calls.started.wait(), 5)

    def run(self, max_tokens: int = 100, stop: tuple[int, ...] = ()) -> "asyncio.Task[list[TokenDelta]]":
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop)

        async def collect() -> list[TokenDelta]:
            return [delta async for delta in self.engines.generate([1, 2, 3], sampling, "r")]

        return asyncio.create_task(collect())


async def test_tokens_arrive_in_order_and_the_finish_ends_the_stream() -> None:
    rig = Rig()
    reading = rig.run()
    await rig.call_started(1)
    rig.send(0, 5, 6)
    await asyncio.sleep(0)
    rig.send(0, 7, finish="stop")
    deltas = await asyncio.wait_for(reading, 5)
    assert [token for delta in deltas for token in delta.tokens] == [5, 6, 7]
    assert deltas[-1].finish == "stop" and all(delta.request_id == "r" for delta in deltas)
    assert unpack_i32(rig.calls.requests[0].prompt).tolist() == [1, 2, 3]


async def test_slow_reader_gets_everything_as_one_delta() -> None:
    rig = Rig()
    stream = rig.engines.generate([1], SamplingParams(max_tokens=100), "r")
    first = asyncio.ensure_future(anext(stream))
    await rig.call_started(1)
    rig.send(0, 1)
    assert (await first).tokens == (1,)
    for token in range(2, 9):
        rig.send(0, token)
    assert (await anext(stream)).tokens == tuple(range(2, 9))
    await stream.aclose()


async def test_logprobs_of_the_prompt_come_before_tokens_and_none_is_lost() -> None:
    rig = Rig()
    sampling = SamplingParams(max_tokens=100, prompt_logprobs=0)
    stream = rig.engines.generate([1, 2, 3], sampling, "r")
    first = asyncio.ensure_future(anext(stream))
    await rig.call_started(1)
    parts = [PromptLogprobs(start, b"\0" * 4, b"\0" * 4) for start in (1, 2)]
    for part in parts[:1]:
        rig.send_prompt(0, part)
    assert (await first).prompt_logprobs == (parts[0],)
    rig.send_prompt(0, parts[1])
    rig.send(0, 7)
    delta = await anext(stream)
    assert delta.prompt_logprobs == (parts[1],) and delta.tokens == (7,)
    await stream.aclose()


async def test_closing_the_generator_closes_the_stream() -> None:
    rig = Rig()
    stream = rig.engines.generate([1], SamplingParams(max_tokens=100), "r")
    first = asyncio.ensure_future(anext(stream))
    await rig.call_started(1)
    rig.send(0, 1)
    await first
    await stream.aclose()
    assert rig.calls.closed == rig.calls.streams[:1]


async def test_cancelling_the_reader_closes_the_stream() -> None:
    rig = Rig()
    reading = rig.run()
    await rig.call_started(1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert rig.calls.closed == rig.calls.streams[:1]


async def test_reader_cancelled_as_a_token_arrives_closes_the_stream() -> None:
    """asyncio.wait_for of Python 3.11 loses such a cancellation, and the request ran to its last token."""
    rig = Rig()
    reading = rig.run()
    await rig.call_started(1)
    await asyncio.sleep(0)
    rig.send(0, 1)
    await asyncio.sleep(0)  # the event's waiter has ended, its reader has not run
    reading.cancel()
    await asyncio.wait((reading,), timeout=5)
    assert reading.cancelled()
    assert rig.calls.closed == rig.calls.streams[:1]


async def test_refusal_is_raised_before_the_first_delta() -> None:
    rig = Rig()
    reading = rig.run()
    await rig.call_started(1)
    rig.refuse(0, Refusal("queue_full", "full", 3.0))
    with pytest.raises(EngineRefused) as refused:
        await reading
    assert refused.value.refusal.retry_after_s == 3.0


async def test_another_engine_is_asked_where_one_refuses() -> None:
    rig = Rig()
    rig.calls.present = ["full", "free"]
    reading = rig.run()
    await rig.call_started(1)
    rig.refuse(0, Refusal("queue_full", "full", 3.0))
    await rig.call_started(2)
    rig.send(1, 7, finish="length")
    assert (await asyncio.wait_for(reading, 5))[-1].tokens == (7,)
    assert rig.calls.engines == ["full", "free"] and not rig.calls.requests[1].resumed


async def test_of_two_full_engines_the_one_with_room_first_names_the_time() -> None:
    rig = Rig()
    rig.calls.present = ["soon", "later"]
    reading = rig.run()
    await rig.call_started(1)
    rig.refuse(0, Refusal("queue_full", "full", 3.0))
    await rig.call_started(2)
    rig.refuse(1, Refusal("queue_full", "full", 50.0))
    with pytest.raises(EngineRefused) as refused:
        await asyncio.wait_for(reading, 5)
    assert refused.value.refusal.retry_after_s == 3.0


async def test_a_request_that_is_too_large_for_one_engine_is_for_all() -> None:
    rig = Rig()
    rig.calls.present = ["a", "b"]
    reading = rig.run()
    await rig.call_started(1)
    rig.refuse(0, Refusal("too_large", "by far"))
    with pytest.raises(EngineRefused, match="by far"):
        await asyncio.wait_for(reading, 5)
    assert rig.calls.engines == ["a"]


async def test_the_engine_that_comes_is_waited_for_where_one_leaves() -> None:
    rig = Rig()
    reading = rig.run()
    await rig.call_started(1)
    rig.refuse(0, Refusal("leaving", "the engine is draining"))
    with pytest.raises(EngineRefused) as refused:
        await asyncio.wait_for(reading, 5)
    assert refused.value.refusal.kind == "not_ready" and rig.calls.waits == [remote_engines.NEW_WAIT_S]


async def test_no_engine_is_an_answer_after_a_while() -> None:
    rig = Rig()
    rig.calls.present = []
    with pytest.raises(EngineRefused, match="no engine is there"):
        await asyncio.wait_for(rig.run(), 5)
    assert rig.calls.waits == [remote_engines.NEW_WAIT_S]


async def test_dead_engine_is_resumed_once_with_the_tokens_delivered() -> None:
    rig = Rig()
    reading = rig.run()
    await rig.call_started(1)
    rig.send(0, 5, 6)
    await asyncio.sleep(0.01)
    rig.lose(0, "the replica died")
    await rig.call_started(2)
    resumed = rig.calls.requests[1]
    assert unpack_i32(resumed.output).tolist() == [5, 6] and resumed.request_id != "r"
    rig.send(1, 7, finish="length")
    deltas = await asyncio.wait_for(reading, 5)
    assert [token for delta in deltas for token in delta.tokens] == [5, 6, 7]


@pytest.mark.parametrize("resume", [True, False])
async def test_requests_leave_an_engine_that_is_stuck(monkeypatch: pytest.MonkeyPatch, resume: bool) -> None:
    monkeypatch.setattr(remote_engines, "STUCK_PERIOD_S", 0.01)
    rig = Rig(resume)
    reading = rig.run()
    await rig.call_started(1)
    rig.send(0, 5, 6)
    await asyncio.sleep(0.05)
    assert len(rig.calls.streams) == 1
    rig.calls.stuck.add("e")
    rig.calls.present = ["f"]
    if not resume:  # the engine says how it ends
        await asyncio.sleep(0.05)
        assert len(rig.calls.streams) == 1
        rig.send(0, 7, finish="length")
    else:
        await rig.call_started(2)
        assert rig.calls.closed == rig.calls.streams[:1] and rig.calls.engines == ["e", "f"]
        assert unpack_i32(rig.calls.requests[1].output).tolist() == [5, 6]
        rig.send(1, 7, finish="length")
    deltas = await asyncio.wait_for(reading, 5)
    assert [token for delta in deltas for token in delta.tokens] == [5, 6, 7]


async def test_a_request_whose_engines_hang_is_sent_to_two_and_no_third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engines, "STUCK_PERIOD_S", 0.01)
    rig = Rig()
    reading = rig.run()
    await rig.call_started(1)
    rig.send(0, 5)
    await asyncio.sleep(0.02)
    rig.calls.stuck.add("e")
    rig.calls.present = ["f"]
    await rig.call_started(2)
    assert [request.num_crashes for request in rig.calls.requests] == [0, 1]
    rig.send(1, 6)
    await asyncio.sleep(0.02)
    rig.calls.stuck.add("f")
    rig.calls.present = ["g"]
    deltas = await asyncio.wait_for(reading, 5)
    assert deltas[-1].finish == "error" and rig.calls.engines == ["e", "f"]


async def test_engine_that_dies_with_tokens_under_way_is_noticed() -> None:
    """Its last tokens and its death are seen at once: the reader must not sleep after taking the tokens."""
    rig = Rig()
    reading = rig.run()
    await rig.call_started(1)
    rig.send(0, 5, 6)
    rig.lose(0, "the replica died")
    await rig.call_started(2)
    assert unpack_i32(rig.calls.requests[1].output).tolist() == [5, 6]
    rig.send(1, 7, finish="length")
    deltas = await asyncio.wait_for(reading, 5)
    assert [token for delta in deltas for token in delta.tokens] == [5, 6, 7]


async def test_third_failure_ends_with_an_error_delta() -> None:
    rig = Rig()
    reading = rig.run()
    for count in (1, 2, 3):
        await rig.call_started(count)
        rig.send(count - 1)  # an engine had queued it
        rig.lose(-1, f"death {count}")
    deltas = await asyncio.wait_for(reading, 5)
    assert deltas[-1].finish == "error" and "death 3" in str(deltas[-1].error)


async def test_a_queued_request_without_tokens_is_resumed_and_waits_for_an_engine() -> None:
    rig = Rig()
    reading = rig.run()
    await rig.call_started(1)
    assert not rig.calls.requests[0].resumed
    rig.send(0)
    await asyncio.sleep(0)
    rig.lose(0, "the coordinator died")
    await rig.call_started(2)
    assert rig.calls.requests[1].resumed
    rig.send(1, 7, finish="length")
    assert [delta.tokens for delta in await asyncio.wait_for(reading, 5)] == [(7,)], "the news of the queue is no delta"


async def test_a_request_that_no_engine_takes_is_tried_again_and_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engines, "TAKEN_TIMEOUT_S", 0.05)
    rig = Rig()
    reading = rig.run()
    with pytest.raises(EngineRefused) as refused:
        await asyncio.wait_for(reading, 5)
    assert refused.value.refusal.kind == "not_ready" and "no engine took it" in refused.value.refusal.message
    assert len(rig.calls.streams) == 2 and rig.calls.closed == rig.calls.streams
    assert not rig.calls.requests[1].resumed


async def test_a_request_that_was_taken_waits_as_long_as_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engines, "TAKEN_TIMEOUT_S", 0.05)
    rig = Rig()
    reading = rig.run()
    await rig.call_started(1)
    rig.send(0)
    await asyncio.sleep(0.2)
    rig.send(0, 5, finish="stop")
    assert (await asyncio.wait_for(reading, 5))[-1].tokens == (5,)
    assert len(rig.calls.streams) == 1


async def test_health_is_a_probe_on_the_way_of_requests_and_never_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engines, "HEALTH_WAIT_S", 0.05)
    monkeypatch.setattr(remote_engines, "PROBE_MAX_AGE_S", 0.0)
    monkeypatch.setattr(remote_engines, "TAKEN_TIMEOUT_S", 0.3)
    rig = Rig()
    assert (await rig.engines.health())[1] == "the first probe is under way"
    (probe,) = rig.calls.probes
    rig.calls.probe_streams[0].put(TokenDelta(probe.request_id, (), "stop"))
    await asyncio.sleep(0.01)
    assert await rig.engines.health() == ([EngineStats("e", "ready")], ""), (
        "the last answer while the next is asked for"
    )
    await asyncio.sleep(0.35)
    assert (await rig.engines.health())[1] == "", "a second attempt is under way"
    assert rig.calls.suspected == ["e"]
    await asyncio.sleep(0.35)
    assert "no engine took it within 0.3 s" in (await rig.engines.health())[1]
    refusal = Refusal("not_ready", "rank 1 (pid 7 on node 10.0.0.1) has not been heard of for 4.0 s")
    rig.calls.probe_streams[-1].fail(EngineRefused(refusal))
    await asyncio.sleep(0.01)
    assert "rank 1 (pid 7 on node" in (await rig.engines.health())[1]


async def test_an_ingress_meets_the_engines_that_are_ready_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engines, "HEALTH_WAIT_S", 0.01)
    rig = Rig()
    meeting = asyncio.create_task(rig.engines.wait_for_probe(20.0))
    await asyncio.sleep(0.1)
    (probe,) = rig.calls.probes
    assert not meeting.done()
    rig.calls.probe_streams[0].put(TokenDelta(probe.request_id, (), "stop"))
    await asyncio.wait_for(meeting, 5)
    assert (await rig.engines.health())[1] == ""
    silent = Rig()
    await asyncio.wait_for(silent.engines.wait_for_probe(0.1), 5)  # it does not wait for ever,
    starting = Rig()
    starting.calls.status = "starting"
    await asyncio.wait_for(starting.engines.wait_for_probe(20.0), 5)  # nor for an engine that starts


async def test_without_resume_the_first_failure_ends_the_stream() -> None:
    rig = Rig(resume=False)
    reading = rig.run()
    await rig.call_started(1)
    rig.send(0)
    await asyncio.sleep(0)
    rig.lose(0, "gone")
    assert (await asyncio.wait_for(reading, 5))[-1].finish == "error"
    assert len(rig.calls.streams) == 1


async def test_request_that_had_its_last_token_is_not_run_again() -> None:
    rig = Rig()
    reading = rig.run(max_tokens=2)
    await rig.call_started(1)
    rig.send(0, 5, 6)  # the message with the finish is lost with the engine
    await asyncio.sleep(0.01)
    rig.lose(0, "gone")
    deltas = await asyncio.wait_for(reading, 5)
    assert deltas[-1].finish == "length" and len(rig.calls.streams) == 1


async def test_engine_error_is_final() -> None:
    rig = Rig()
    reading = rig.run()
    await rig.call_started(1)
    rig.send(0, finish="error")
    assert (await asyncio.wait_for(reading, 5))[-1].finish == "error"
    assert len(rig.calls.streams) == 1


async def test_stats_are_asked_once_for_many_readers() -> None:
    rig = Rig()
    await asyncio.gather(*(rig.engines.stats() for _ in range(20)))
    assert rig.calls.num_stats == 1


async def test_tokens_that_nobody_takes_cost_a_few_bytes_each() -> None:
    """10,000 clients that do not read their answers of 4,000 tokens cost 0.2 GB, not 1.5."""
    stream, count = RequestStream(), 500
    tracemalloc.start()
    for i in range(count):
        stream.put(TokenDelta("q", tuple(range(1000 + 100 * i, 1100 + 100 * i))))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 6 * 100 * count
    delta = stream.take("q")
    assert delta is not None and delta.tokens == tuple(range(1000, 1000 + 100 * count))
