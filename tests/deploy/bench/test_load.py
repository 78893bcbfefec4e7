"""Load: what arrives, what is read of answers, what the figures mean."""

import asyncio
import itertools
import json
import math
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from aerie.deploy.bench.arrivals import MIXES, OWN_TOKENS, Arrival, Lengths, Mix, Prefixes, Traffic, repeated_tokens
from aerie.deploy.bench.figures import Point, line_plot, markdown, rate_figures, ticks
from aerie.deploy.bench.load import Target, run_rate
from aerie.deploy.bench.stream_client import Answered, Connection, Pool, request_bytes
from tests.support.clients.closed_loop import closed_loop

MIX = Mix(Lengths(100, 0.8, 400), Lengths(20, 0.5, 60))
TRAFFIC = Traffic(MIX, seconds=2000, max_requests=3000, first_id=300, vocab=900)
EVENTS = [
    b'data: {"choices":[{"text":"a"}]}\n\n',
    b'data: {"choices":[{"text":"b\xc3\xa9"}],"usage":null}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7,'
    b'"prompt_tokens_details":{"cached_tokens":2}}}\n\n',
    b"data: [DONE]\n\n",
]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_arrivals_are_poisson_and_the_same_for_every_server() -> None:
    """The mean gap of 3,000 is within 5 standard errors of 1/rate (a false alarm in a million); the means of lengths
    are below what is asked for by what the cap takes."""
    arrivals = TRAFFIC.arrivals(4.0)
    assert arrivals == TRAFFIC.arrivals(4.0) != TRAFFIC.arrivals(5.0)
    gaps = [b.due_s - a.due_s for a, b in zip(arrivals, arrivals[1:], strict=False)]
    assert len(arrivals) == 3000 and statistics.fmean(gaps) == pytest.approx(0.25, abs=5 * 0.25 / math.sqrt(3000))
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.15)  # as large as the mean: exponential
    lengths = [len(arrival.prompt) for arrival in arrivals]
    assert max(lengths) == 400 and 85 < statistics.fmean(lengths) < 100
    assert {token for arrival in arrivals[:50] for token in arrival.prompt} <= set(range(300, 900))
    assert all(1 <= arrival.num_tokens <= 60 for arrival in arrivals)


def test_an_infinite_rate_is_a_burst_of_uniform_lengths() -> None:
    """Seed 003's load: 500 requests at once, each length from 0.7 of 1,024 tokens up; all lengths are drawn."""
    burst = Traffic(MIXES["throughput"], seconds=1, max_requests=500, first_id=0, vocab=10)
    arrivals = burst.arrivals(math.inf)
    assert arrivals == burst.arrivals(math.inf) != replace(burst, seed=1).arrivals(math.inf)
    assert len(arrivals) == 500 and {arrival.due_s for arrival in arrivals} == {0.0}
    lengths = [length for arrival in arrivals for length in (len(arrival.prompt), arrival.num_tokens)]
    assert 717 <= min(lengths) < 730 and 1010 < max(lengths) <= 1024
    assert statistics.fmean(lengths) == pytest.approx(MIXES["throughput"].prompts.mean, abs=5 * 89 / math.sqrt(1000))
    scaled = MIXES["throughput"].scaled(100, 10)
    assert min(scaled.prompts.draw(np.random.default_rng(0), 99)) >= 70 and scaled.answers.cap == 10


def test_arrivals_end_with_the_time() -> None:
    short = Traffic(Mix(Lengths(8, 0.0, 8), Lengths(1, 0.0, 1)), seconds=10, max_requests=100, first_id=0, vocab=10)
    arrivals = short.arrivals(1.0)
    assert 0 < len(arrivals) < 40 and arrivals[-1].due_s <= 10
    assert {len(arrival.prompt) for arrival in arrivals} == {8}


def test_a_share_of_prompts_begins_with_common_texts() -> None:
    """In 3,000 requests the share of 0.4 is met within 5 standard errors (a false alarm in a million). The other
    requests are those of the plain mix, to the token; times and answers are the same for all."""
    plain = TRAFFIC.arrivals(4.0)
    mixed = replace(TRAFFIC, mix=replace(MIX, prefixes=Prefixes(3, 90, 0.4))).arrivals(4.0)
    alike = [(a, b) for a, b in zip(plain, mixed, strict=True) if a.prompt != b.prompt]
    assert len(alike) / 3000 == pytest.approx(0.4, abs=5 * math.sqrt(0.4 * 0.6 / 3000))
    assert len({b.prompt[:90] for _, b in alike}) == 3
    for a, b in alike:
        assert len(b.prompt) == max(len(a.prompt), 90 + OWN_TOKENS)
        assert len(a.prompt) < 90 + OWN_TOKENS or a.prompt[90:] == b.prompt[90:]
    assert [(a.due_s, a.num_tokens) for a in plain] == [(b.due_s, b.num_tokens) for b in mixed]


def test_a_mix_keeps_its_proportions_for_a_shorter_model() -> None:
    small = MIXES["prompt-heavy"].scaled(700, 100)
    assert small.prompts == Lengths(300, 0.8, 700) and small.answers.cap == 100
    assert small.prefixes == Prefixes(8, 204, 0.4)


def _chunked(events: Sequence[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"


async def _answered(raw: bytes, size: int) -> tuple[Answered, Connection]:
    """The answer whose bytes come `size` at a time."""
    connection, answered = Connection(), Answered()
    connection.connection_made(Mock(spec=asyncio.Transport))
    connection.ask(b"", answered)
    for i in range(0, len(raw), size):
        assert not answered.end_s
        connection.data_received(raw[i : i + size])
    return answered, connection


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
async def test_body_is_the_same_however_it_arrives(size: int) -> None:
    """Events that are split between chunks, and chunks between reads."""
    whole = b"".join(EVENTS)
    raw = HEAD + _chunked([whole[i : i + 11] for i in range(0, len(whole), 11)])
    answered, connection = await _answered(raw, size)
    assert (answered.fault, answered.num_tokens, len(answered.event_s)) == ("", 7, 2) and answered.end_s
    assert not connection._transport.close.called  # type: ignore[union-attr]


async def test_body_of_a_stated_length_ends_with_it() -> None:
    answered, connection = await _answered(
        b"HTTP/1.1 429 Too Many\r\nContent-Length: 5\r\nConnection: close\r\n\r\nfull!", 62
    )
    assert answered.fault == "429: full!" and answered.end_s
    assert connection._transport.close.called  # type: ignore[union-attr]
    answered, _ = await _answered(b"HTTP/1.1 503 None\r\nRetry-After: 2\r\nContent-Length: 0\r\n\r\n", 100)
    assert answered.fault == "503, again after 2 s: " and answered.end_s


@asynccontextmanager
async def _server(
    answers: Sequence[Sequence[bytes]], heads: list[bytes] | None = None
) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Sends one of `answers` piece by piece for each request in turn; its URL, and the bodies that it got. heads: gets
    the heads of requests."""
    bodies: list[bytes] = []
    left = iter(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            bodies.append(await reader.readexactly(length))
            if heads is not None:
                heads.append(head)
            for piece in next(left):
                await asyncio.sleep(0.02)
                writer.write(piece)
                await writer.drain()
            if writer.is_closing():
                return

    async def ended(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, StopIteration, RuntimeError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(ended, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", bodies


def test_an_unlimited_cache_finds_the_longest_shared_prefix_of_whole_blocks() -> None:
    first = list(range(40))
    assert repeated_tokens([first, first]) == 32  # two blocks of 16; the rest is no block
    assert repeated_tokens([first, first[:20] + [99] * 20]) == 16
    assert repeated_tokens([first, [99, *first[1:]]]) == 0  # equal blocks after another beginning
    assert repeated_tokens([first, first[:20] + [99] * 20, first[:20] + [99] * 28]) == 16 + 32


def _arrival(due_s: float) -> Arrival:
    return Arrival(due_s, (5, 6, 7), 7)


async def test_answers_are_read_event_by_event() -> None:
    pieces = [HEAD, *(b"%x\r\n%s\r\n" % (len(event), event) for event in EVENTS), b"0\r\n\r\n"]
    async with _server([pieces, pieces]) as (url, bodies):
        answers, begin_s = await run_rate(Target(url, "m"), [_arrival(0.0), _arrival(0.5)], 5.0)
    for answered, due_s in zip(answers, (0.0, 0.5), strict=True):
        assert answered.fault == "" and answered.num_tokens == 7 and len(answered.event_s) == 2
        assert (answered.num_prompt, answered.num_cached) == (3, 2)
        assert begin_s + due_s <= answered.sent_s < answered.event_s[0] < answered.event_s[1] < answered.end_s
    first = json.loads(bodies[0])
    assert first["prompt"] == [5, 6, 7] and first["max_tokens"] == 7 and first["ignore_eos"] and first["stream"]
    figures = rate_figures(2.0, [_arrival(0.0), _arrival(0.5)], answers, begin_s)
    assert figures["completed"] == 2 and figures["output_tokens"] == 14 and figures["wrong_length"] == 0
    assert (figures["prompt_tokens"], figures["cached_tokens"]) == (6, 4) and "67%" in markdown({"x": [figures]})[2]


async def test_requests_have_the_ids_that_they_are_given() -> None:
    pieces, heads = [HEAD, b"0\r\n\r\n"], list[bytes]()
    async with _server([pieces] * 3, heads) as (url, _):
        await run_rate(Target(url, "m"), [_arrival(0.0), _arrival(0.3)], 5.0, request_ids=["one", "two"])
        await run_rate(Target(url, "m"), [_arrival(0.0)], 5.0)
    assert [head.partition(b"X-Request-Id: ")[2].split(b"\r\n")[0] for head in heads] == [b"one", b"two", b""]


async def test_streams_of_a_closed_loop_ask_again_until_a_failure() -> None:
    whole = [HEAD, _chunked(EVENTS)]
    async with _server([whole, whole, whole, [b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"]]) as (url, bodies):
        port, answers = int(url.rpartition(":")[2]), list[Answered]()
        requests = (request_bytes(port, {"number": number}) for number in range(5))
        await closed_loop(Pool("127.0.0.1", port), requests, 1, answers)
    assert [json.loads(body)["number"] for body in bodies] == [0, 1, 2, 3]
    assert [answered.fault for answered in answers] == ["", "", "", "500: "]
    assert all(later.sent_s >= former.end_s for former, later in itertools.pairwise(answers))


async def test_faults_are_counted_and_named() -> None:
    refusal = b'HTTP/1.1 429 No\r\nRetry-After: 7\r\nContent-Length: 19\r\n\r\n{"error":"is full"}'
    failing = b'data: {"error":{"message":"lost"}}\n\n'
    answers = [[refusal], [HEAD, _chunked([failing, EVENTS[-1]])], [HEAD, b"5\r\nabc"]]
    arrivals = [_arrival(0.0), _arrival(0.3), _arrival(0.6)]
    async with _server(answers) as (url, _):
        got, begin_s = await run_rate(Target(url, "m"), arrivals, 0.5)
    assert [answered.fault for answered in got] == [
        '429, again after 7 s: {"error":"is full"}',
        '{"message":"lost"}',
        "unfinished at the end of the measurement",
    ]
    figures = rate_figures(3.0, arrivals, got, begin_s)
    assert (figures["completed"], figures["errors"], figures["tokens_per_s"]) == (0, 3, 0.0)
    assert figures["ttft_ms"]["p99"] is None and len(figures["first_errors"]) == 3
    assert "- / - / -" in markdown({"x": [figures]})[2]


async def test_nobody_listening_is_a_fault() -> None:
    answers, _ = await run_rate(Target("http://127.0.0.1:9", "m"), [_arrival(0.0)], 5.0)
    assert "refused" in answers[0].fault.lower()


def test_figures_are_what_their_definitions_say() -> None:
    """Two answers by hand: due at 1 and 2 s after the clock's 10, sent 5 and 15 ms late."""
    arrivals = [Arrival(1.0, (1,), 5), Arrival(2.0, (1,), 3)]
    answers = [
        Answered([11.1, 11.2, 11.5], 5, 11.005, 11.6, ""),
        Answered([12.3, 12.4], 0, 12.015, 12.4, ""),  # a server that does not count: as many as were asked for
    ]
    figures = rate_figures(1.0, arrivals, answers, 10.0)
    assert figures["ttft_ms"]["p50"] == pytest.approx(200) and figures["ttft_ms"]["p99"] == pytest.approx(298)
    assert figures["itl_ms"]["p50"] == pytest.approx(100)  # of 100, 300, 100
    assert figures["tpot_ms"]["p50"] == pytest.approx(75)  # of 400 / 4 and 100 / 2
    assert figures["e2e_ms"]["p50"] == pytest.approx(500) and figures["late_ms"]["p50"] == pytest.approx(10)
    assert figures["output_tokens"] == 8 and figures["tokens_per_s"] == pytest.approx(8 / 2.4, abs=0.1)


def test_plot_is_an_svg_of_all_points() -> None:
    text = line_plot("a < b", "x", "y & z", {"one": [Point(1, 10, "10 ms"), Point(2, 30)], "two": [Point(4, 5)]})
    root = ElementTree.fromstring(text)
    names = [child.tag.rpartition("}")[2] for child in root]
    assert names.count("polyline") == 2 and names.count("circle") == 3
    texts = [child.text for child in root if child.tag.endswith("text")]
    assert {"a < b", "y & z", "10 ms", "one", "two"} <= set(texts)
    for child in root:
        if child.tag.endswith("circle"):
            assert 0 < float(child.attrib["cx"]) < 720 and 0 < float(child.attrib["cy"]) < 420


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(0.0, [0, 1]), (5.0, [0, 1, 2, 3, 4, 5]), (0.7, [0, 0.2, 0.4, 0.6, 0.8]), (118.0, [0, 50, 100, 150])],
)
def test_ticks_are_round_and_reach_the_largest(largest: float, expected: list[float]) -> None:
    assert ticks(largest) == pytest.approx(expected)
