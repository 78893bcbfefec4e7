"""An open loop over HTTP: requests arrive by a clock, whether the server keeps up or not.

    python -m tests.bench.open_loop [--rates 1 2] [--seconds 20]                     # the embedded pair on this CPU
    python -m tests.bench.open_loop --gpu --shape chain --rates 4 12 20 --seconds 40
    python -m tests.bench.open_loop --url http://127.0.0.1:8000 --rates 4            # a server that runs already
    python -m tests.bench.open_loop --gpu --vary scheduler.max_step_tokens=512,2048,8192 --rates 12 --plot trade.svg

Poisson arrivals, lognormal lengths, prompts of random token ids, streamed greedy answers of a fixed length on
/v1/completions; seed, rate and lengths decide the requests, so that every server gets the same. --vary starts a server
for each value of a key of the configuration. A Markdown table (`tests.bench.open_loop_figures` defines its columns),
then one JSON line. The plot: with one server latencies over rates, with several TTFT against ITL at the last rate, a
point for each; --beside adds those of other servers from a file. On the loopback only, and never longer than seconds
and drain allow.
"""

import argparse
import asyncio
import contextlib
import gc
import ipaddress
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from tests.bench.arrivals import Arrival, Lengths, Traffic
from tests.bench.machine import machine
from tests.bench.open_loop_figures import Rate, markdown, rate_figures, read_others, trade
from tests.bench.plot import Point, line_plot
from tests.bench.served import running
from tests.bench.served_model import add_options, label, prompt_ids, server_config
from tests.bench.sse_client import request_bytes
from tests.bench.stream_client import Answered, Pool

WARM_UP = 16  # requests, all at once, twice
LEAD_S = 0.2  # from the start of the clock to the first arrival that may be due
# Of prompts, then of answers: mean, sigma, cap.
SMALL, LARGE = ((96, 0.8, 512), (32, 0.8, 128)), ((1024, 0.8, 4096), (256, 0.8, 1024))


async def run_rate(
    url: str, arrivals: Sequence[Arrival], model: str, drain_s: float, named: Sequence[str] = ()
) -> tuple[list[Answered], float]:
    """Send every request when it is due, wait up to drain_s for the rest after the last; answers in the order of
    arrivals, and when the clock began. named: the requests' X-Request-Id, if they have one."""
    where = urlsplit(url)
    host, port = where.hostname, where.port
    assert host is not None and port is not None
    requests = [
        request_bytes(port, _body(arrival, model), "completions", host, request_id)
        for arrival, request_id in itertools.zip_longest(arrivals, named, fillvalue="")
    ]
    pool = Pool(host, port)
    answers = [Answered() for _ in arrivals]
    tasks: list[asyncio.Task[None]] = []
    begin_s = time.perf_counter() + LEAD_S
    for arrival, request, answered in zip(arrivals, requests, answers, strict=True):
        await asyncio.sleep(max(0.0, begin_s + arrival.due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(_ask(pool, request, answered)))
    if tasks:
        await asyncio.wait(tasks, timeout=drain_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    pool.close()
    return answers, begin_s


async def _ask(pool: Pool, request: bytes, answered: Answered) -> None:
    try:
        await pool.ask(request, answered)
    except asyncio.CancelledError:
        answered.fault = "not done when the time was over"
        raise
    except (OSError, ValueError) as error:
        answered.fault = f"{type(error).__name__}: {error}"[:300]


def _body(arrival: Arrival, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": arrival.prompt,
        "max_tokens": arrival.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def measure(url: str, traffic: Traffic, rates: Sequence[float], drain_s: float) -> list[Rate]:
    """All rates, one after the other, after a warm-up."""
    model = served_model(url)
    warm = [Arrival(0.0, arrival.prompt, min(64, arrival.num_tokens)) for arrival in traffic.arrivals(1000.0)[:WARM_UP]]
    for prompts in (warm[:1], warm, warm[::-1]):
        answers, _ = await run_rate(url, prompts, model, drain_s)
        faults = sorted({answer.fault for answer in answers if answer.fault})
        if faults:
            raise RuntimeError(f"{url}: the warm-up failed: {faults[0]}")
    found = []
    for rate in rates:
        arrivals = traffic.arrivals(rate)
        gc.collect()
        gc.disable()  # a collection among thousands of events would be measured as the server's
        try:
            answers, begin_s = await run_rate(url, arrivals, model, drain_s)
        finally:
            gc.enable()
        found.append(rate_figures(rate, arrivals, answers, begin_s))
        print(f"{rate:g}/s: {json.dumps(found[-1])}", file=sys.stderr, flush=True)
    return found


def served_model(url: str) -> str:
    """The name that clients ask for."""
    return str(httpx.get(f"{url}/v1/models", timeout=10).raise_for_status().json()["data"][0]["id"])


def varied(content: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A Serve config file's content with `key` (section.name) of the application set to `value`."""
    section, _, name = key.partition(".")
    application = content["applications"][0]
    args = application["args"] | {section: {**application["args"].get(section, {}), name: value}}
    return content | {"applications": [{**application, "args": args}]}


def check_loopback(url: str) -> None:
    """Raises ValueError for a server on another machine."""
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return
    raise ValueError(f"--url {url}: this load is for servers of this machine; give one on 127.0.0.1")


def servers(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Name and URL of each server, while it runs."""
    if arguments.url:
        yield arguments.name or arguments.url, arguments.url.rstrip("/")
        return
    key, _, values = arguments.vary.partition("=")
    options = ["--no-haproxy"] if arguments.no_haproxy else []
    with tempfile.TemporaryDirectory(prefix="open") as folder:
        content = server_config(arguments, Path(folder))
        for value in values.split(",") if values else [""]:
            own = varied(content, key, yaml.safe_load(value)) if value else content
            name = f"{arguments.name or label(arguments)}{f', {key} {value}' if value else ''}"
            with running("deploy.cli serve", own, *options, ready_limit_s=arguments.start_limit) as server:
                yield name, server.url


def plot(results: dict[str, list[Rate]], others: dict[str, list[Rate]], rates: Sequence[float]) -> str:
    """An SVG: of one server its latencies by rate, of several TTFT against ITL at the last rate."""
    if len(results) + len(others) == 1:
        (name, found), *_ = results.items()
        kinds = (("TTFT p50", "ttft_ms", "p50"), ("TTFT p99", "ttft_ms", "p99"), ("ITL p99", "itl_ms", "p99"))
        lines = {
            title: [Point(rate["rate"], rate[kind][q]) for rate in found if rate[kind][q] is not None]
            for title, kind, q in kinds
        }
        return line_plot(name, "requests per second", "ms", lines)
    lines = {
        "Aerie": trade(results, rates[-1]),
        **{name: trade({name: found}, rates[-1]) for name, found in others.items()},
    }
    return line_plot(f"at {rates[-1]:g} requests per second", "ITL p99, ms", "TTFT p99, ms", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--url", default="", help="of a server that runs, on this machine")
    parser.add_argument("--name", default="", help="of the server, in the output")
    parser.add_argument("--vary", default="", metavar="SECTION.KEY=VALUE,...", help="a server for each of these values")
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0], help="requests per second, one after another")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals at each rate")
    parser.add_argument("--max-requests", type=int, default=5000, help="at each rate")
    parser.add_argument("--drain", type=float, default=60.0, help="seconds after the last arrival, then cancel")
    parser.add_argument("--prompts", nargs=3, type=float, metavar=("MEAN", "SIGMA", "CAP"), help="tokens")
    parser.add_argument("--answers", nargs=3, type=float, metavar=("MEAN", "SIGMA", "CAP"), help="tokens")
    parser.add_argument("--vocab", type=int, default=0, help="prompt ids are drawn from below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    parser.add_argument("--beside", type=Path, help="figures of other servers for the plot, JSON objects one a line")
    arguments = parser.parse_args()
    if arguments.url:
        if arguments.vary:
            parser.error("--vary starts servers of its own; leave --url out")
        try:
            check_loopback(arguments.url)
        except ValueError as error:
            parser.error(str(error))
    prompts, answers = LARGE if arguments.gpu else SMALL
    ids = prompt_ids(arguments)
    traffic = Traffic(
        lengths(arguments.prompts or prompts),
        lengths(arguments.answers or answers),
        arguments.seconds,
        arguments.max_requests,
        ids.start,
        arguments.vocab or ids.stop,
        arguments.seed,
    )
    results: dict[str, list[Rate]] = {}
    for name, url in servers(arguments):
        results[name] = asyncio.run(measure(url, traffic, arguments.rates, arguments.drain))
    others = read_others(arguments.beside) if arguments.beside else {}
    print(*markdown({**results, **others}), sep="\n")
    if arguments.plot:
        arguments.plot.write_text(plot(results, others, arguments.rates))
    print(json.dumps({"bench": "open_loop", "machine": machine(), "seed": arguments.seed, "results": results}))


def lengths(given: Sequence[float]) -> Lengths:
    """From mean, sigma and cap."""
    mean, sigma, cap = given
    return Lengths(mean, sigma, int(cap))


if __name__ == "__main__":
    main()
