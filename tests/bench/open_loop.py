"""An open loop over HTTP: requests arrive by a clock, whether the server keeps up or not.

    python -m tests.bench.open_loop [--rates 1 2] [--seconds 20]                     # the embedded pair on this CPU
    python -m tests.bench.open_loop --gpu --shape chain --rates 4 12 20 --seconds 40
    python -m tests.bench.open_loop --url http://127.0.0.1:8000 --rates 4            # a server that runs already
    python -m tests.bench.open_loop --gpu --vary scheduler.max_step_tokens=512,2048,8192 --rates 12 --plot trade.svg

Poisson arrivals, lognormal lengths, prompts of random token ids, streamed greedy answers of a fixed length on
/v1/completions; seed, rate and lengths decide the requests, so that every server gets the same. --vary starts a server
for each value of a key of the configuration. A Markdown table (`deploy.bench.figures` defines its columns),
then one JSON line. The plot: with one server latencies over rates, with several TTFT against ITL at the last rate, a
point for each; --beside adds those of other servers from a file. On the loopback only, and never longer than seconds
and drain allow.
"""

import argparse
import asyncio
import contextlib
import ipaddress
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from deploy.bench.arrivals import Lengths, Traffic
from deploy.bench.figures import Rate, latency_plot, markdown, read_others, trade
from deploy.bench.load import Target, measure_rate, warm_up
from deploy.bench.plot import line_plot
from tests.bench.machine import machine
from tests.bench.served import running
from tests.bench.served_model import add_options, label, prompt_ids, server_config

# Of prompts, then of answers: mean, sigma, cap.
SMALL, LARGE = ((96, 0.8, 512), (32, 0.8, 128)), ((1024, 0.8, 4096), (256, 0.8, 1024))


async def measure(url: str, traffic: Traffic, rates: Sequence[float], drain_s: float) -> list[Rate]:
    """All rates, one after the other, after a warm-up."""
    target = Target(url, served_model(url))
    await warm_up(target, traffic, drain_s)
    found = []
    for rate in rates:
        found.append(await measure_rate(target, traffic, rate, drain_s))
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
        return latency_plot(name, found)
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
