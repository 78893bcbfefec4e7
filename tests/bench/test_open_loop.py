"""The open loop: what arrives, what is read of answers, what the figures mean."""

import argparse
import asyncio
import json
import math
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.bench.arrivals import Arrival, Lengths, Traffic
from deploy.bench.figures import markdown, rate_figures, read_others
from deploy.bench.load import Target, run_rate
from deploy.bench.plot import Point, line_plot, ticks
from deploy.bench.stream_client import Answered, BodyReader
from tests.bench.open_loop import check_loopback, plot, varied
from tests.bench.served import embedded_config
from tests.bench.served_model import add_options, server_config

TRAFFIC = Traffic(
    Lengths(100, 0.8, 400), Lengths(20, 0.5, 60), seconds=2000, max_requests=3000, first_id=300, vocab=900
)
EVENTS = [
    b'data: {"choices":[{"text":"a"}]}\n\n',
    b'data: {"choices":[{"text":"b\xc3\xa9"}],"usage":null}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}\n\n',
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


def test_arrivals_end_with_the_time() -> None:
    short = Traffic(Lengths(8, 0.0, 8), Lengths(1, 0.0, 1), seconds=10, max_requests=100, first_id=0, vocab=10)
    arrivals = short.arrivals(1.0)
    assert 0 < len(arrivals) < 40 and arrivals[-1].due_s <= 10
    assert {len(arrival.prompt) for arrival in arrivals} == {8}


def _chunked(events: Sequence[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_body_is_the_same_however_it_arrives(size: int) -> None:
    """Events that are split between chunks, and chunks between reads."""
    whole = b"".join(EVENTS)
    raw = HEAD + _chunked([whole[i : i + 11] for i in range(0, len(whole), 11)])
    reader = BodyReader()
    body = b"".join(reader.feed(raw[i : i + size]) for i in range(0, len(raw), size))
    assert body == whole and reader.is_over and reader.status == 200 and reader.keeps_open


def test_body_of_a_stated_length_ends_with_it() -> None:
    reader = BodyReader()
    assert reader.feed(b"HTTP/1.1 429 Too Many\r\nContent-Length: 5\r\nConnection: close\r\n\r\nfu") == b"fu"
    assert not reader.is_over and reader.feed(b"ll!") == b"ll!"
    assert reader.is_over and reader.status == 429 and not reader.keeps_open
    empty = BodyReader()
    assert empty.feed(b"HTTP/1.1 204 None\r\nContent-Length: 0\r\n\r\n") == b"" and empty.is_over


@asynccontextmanager
async def _server(answers: Sequence[Sequence[bytes]]) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Sends one of `answers` piece by piece for each request in turn; its URL, and the bodies that it got."""
    bodies: list[bytes] = []
    left = iter(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            bodies.append(await reader.readexactly(length))
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


def _arrival(due_s: float) -> Arrival:
    return Arrival(due_s, (5, 6, 7), 7)


async def test_answers_are_read_event_by_event() -> None:
    pieces = [HEAD, *(b"%x\r\n%s\r\n" % (len(event), event) for event in EVENTS), b"0\r\n\r\n"]
    async with _server([pieces, pieces]) as (url, bodies):
        answers, begin_s = await run_rate(Target(url, "m"), [_arrival(0.0), _arrival(0.5)], 5.0)
    for answered, due_s in zip(answers, (0.0, 0.5), strict=True):
        assert answered.fault == "" and answered.num_tokens == 7 and len(answered.event_s) == 2
        assert begin_s + due_s <= answered.sent_s < answered.event_s[0] < answered.event_s[1] < answered.end_s
    first = json.loads(bodies[0])
    assert first["prompt"] == [5, 6, 7] and first["max_tokens"] == 7 and first["ignore_eos"] and first["stream"]
    figures = rate_figures(2.0, [_arrival(0.0), _arrival(0.5)], answers, begin_s)
    assert figures["completed"] == 2 and figures["output_tokens"] == 14 and figures["wrong_length"] == 0


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
        "not done when the time was over",
    ]
    figures = rate_figures(3.0, arrivals, got, begin_s)
    assert (figures["completed"], figures["errors"], figures["tokens_per_s"]) == (0, 3, 0.0)
    assert figures["ttft_ms"]["p99"] is None and len(figures["first_errors"]) == 3
    assert "- / -" in markdown({"x": [figures]})[2]


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


def test_load_stays_on_this_machine() -> None:
    for url in ("http://127.0.0.1:8000", "http://localhost:1", "http://[::1]:80"):
        check_loopback(url)
    for url in ("http://10.0.0.1:80", "http://example.com", "127.0.0.1:8000"):
        with pytest.raises(ValueError, match="give one on 127.0.0.1"):
            check_loopback(url)


def test_varying_a_key_leaves_the_rest() -> None:
    before = embedded_config()
    after = varied(before, "scheduler.max_step_tokens", 64)
    scheduler = before["applications"][0]["args"]["scheduler"]
    assert after["applications"][0]["args"]["scheduler"] == scheduler | {"max_step_tokens": 64}
    assert scheduler["max_step_tokens"] != 64 and after["proxy_location"] == before["proxy_location"]


@pytest.mark.parametrize("shape", ["plain", "chain", "tree"])
@pytest.mark.parametrize("model", ["tiny", "dsv3-tiny"])
def test_dummy_weights_make_a_valid_configuration(model: str, shape: str, tmp_path: Path) -> None:
    from deploy.checks import checked

    parser = argparse.ArgumentParser()
    add_options(parser)
    given = parser.parse_args(["--gpu", "--model", model, "--shape", shape, "--max-model-len", "4096"])
    config = checked(server_config(given, tmp_path)["applications"][0]["args"])
    assert config.model.load_format == "dummy" and (config.speculative is None) == (shape == "plain")


def test_plot_is_an_svg_of_all_points(tmp_path: Path) -> None:
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


def test_other_servers_stand_in_the_same_plot(tmp_path: Path) -> None:
    rate = {"name": "peer", "rate": 4.0, "ttft_ms": {"p50": 40, "p99": 130.0}, "itl_ms": {"p50": 6, "p99": 31.0}}
    file = tmp_path / "others.txt"
    file.write_text(f"started\nSERVE {json.dumps(rate)}\n{{}}\n")
    others = read_others(file)
    assert others == {"peer": [rate]}
    own = {f"aerie, x {value}": [rate | {"name": "aerie"}] for value in (1, 2)}
    root = ElementTree.fromstring(plot(own, others, [2.0, 4.0]))  # type: ignore[arg-type]
    assert sum(child.tag.endswith("polyline") for child in root) == 2
    alone = ElementTree.fromstring(plot({"aerie": [rate]}, {}, [4.0]))
    assert sum(child.tag.endswith("polyline") for child in alone) == 3
