"""An open loop over HTTP on servers that are started for it: requests arrive by a clock, whether they keep up or not.

    python -m tests.bench open_loop --loads plain:1,2                        # the embedded pair on this CPU
    python -m tests.bench open_loop --gpu --shape chain --seconds 25 --settle 15 \\
        --loads plain:4,12,20 prompt-heavy:4,8,12                            # Llama-3.1-8B's dimensions, dummy weights
    python -m tests.bench open_loop --gpu --vary scheduler.itl_target_ms=19,auto,31 --loads plain:12 --plot trade.svg

The requests are those of `aerie bench` (`aerie.deploy.bench.arrivals` has the mixes), so that another server, which
that command loads, gets the same. --vary starts a server for each value of a key of the configuration. A Markdown table
(`aerie.deploy.bench.figures` defines its columns), then one JSON line. The plot: with one server latencies over the
last load's rates; with several TTFT against ITL at its last rate, a point for each; --beside adds other servers from a
file.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from aerie.deploy.bench.arrivals import MIXES, Traffic
from aerie.deploy.bench.figures import Point, Rate, latency_plot, line_plot, markdown
from aerie.deploy.bench.load import Target, measure_rate, warm_up
from tests.bench.machine import machine
from tests.bench.served import running
from tests.bench.served_model import add_options, label, prompt_ids, server_config

SMALL_CAPS = (512, 128)  # tokens of a prompt and of an answer, of the embedded pair


@dataclass(frozen=True)
class Load:
    """A mix of `aerie.deploy.bench.arrivals`, and the rates at which it comes."""

    mix: str
    rates: tuple[float, ...]


def parsed_load(text: str) -> Load:
    """From MIX:RATE,RATE. Raises ValueError."""
    mix, _, rates = text.partition(":")
    load = Load(mix, tuple(float(rate) for rate in rates.split(",")))
    if mix not in MIXES or not all(rate > 0 for rate in load.rates):
        raise ValueError
    return load


def add_load_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """What `traffic_of` reads, and the loads. seconds: of arrivals at each rate, unless given."""
    parser.add_argument(
        "--loads",
        nargs="+",
        type=parsed_load,
        default=[Load("plain", (1.0,))],
        metavar="MIX:RATE,RATE",
        help=f"one after another, requests per second; mixes: {', '.join(MIXES)} (default: plain:1)",
    )
    parser.add_argument("--seconds", type=float, default=seconds, help="of arrivals at each rate")
    parser.add_argument("--drain", type=float, default=60.0, help="seconds after the last arrival, then cancel")
    parser.add_argument("--max-requests", type=int, default=5000, help="at each rate; a rate of inf sends all at once")
    parser.add_argument("--settle", type=float, default=0.0, help="idle seconds after the warm-up, for late captures")
    parser.add_argument("--seed", type=int, default=0)


def traffic_of(arguments: argparse.Namespace, mix: str) -> Traffic:
    """The requests of one mix."""
    ids, given = prompt_ids(arguments), MIXES[mix]
    lengths = given if arguments.gpu else given.scaled(*SMALL_CAPS)
    return Traffic(lengths, arguments.seconds, arguments.max_requests, ids.start, ids.stop, arguments.seed)


async def measure(url: str, arguments: argparse.Namespace) -> dict[str, list[Rate]]:
    """Return the figures of each rate by mix, after a warm-up."""
    target, found = Target(url, served_model(url)), dict[str, list[Rate]]()
    await warm_up(target, traffic_of(arguments, arguments.loads[0].mix), arguments.drain)
    await asyncio.sleep(arguments.settle)
    for load in arguments.loads:
        for rate in load.rates:
            figures = await measure_rate(target, traffic_of(arguments, load.mix), rate, arguments.drain)
            found.setdefault(load.mix, []).append(figures)
            print(f"{load.mix} {rate:g}/s: {json.dumps(figures)}", file=sys.stderr, flush=True)
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


@contextlib.contextmanager
def served(arguments: argparse.Namespace, content: dict[str, Any], hook: Sequence[Path] = ()) -> Iterator[str]:
    """The URL of a server with this configuration, while it runs. hook: folders that it imports from first."""
    options = ["--no-haproxy"] if arguments.no_haproxy else []
    limit_s = arguments.start_limit
    with running("aerie.deploy.cli serve", content, *options, ready_limit_s=limit_s, python_path=hook) as server:
        print(f"ready after {server.ready_s:.1f} s", file=sys.stderr, flush=True)
        yield server.url


def plot(results: Mapping[str, list[Rate]], others: Mapping[str, list[Rate]], rate: float) -> str:
    """An SVG: of one server its latencies by rate, of several TTFT against ITL at `rate`."""
    if len(results) + len(others) == 1:
        (name, found), *_ = results.items()
        return latency_plot(name, found)
    lines = {"Aerie": trade(results, rate), **{name: trade({name: found}, rate) for name, found in others.items()}}
    return line_plot(f"at {rate:g} requests per second", "ITL p99, ms", "TTFT p99, ms", lines)


def trade(results: Mapping[str, Sequence[Rate]], rate: float) -> list[Point]:
    """TTFT against ITL, 99th percentiles, a point for each server, at one rate."""
    return [
        Point(found["itl_ms"]["p99"], found["ttft_ms"]["p99"], name)
        for name, rates in results.items()
        for found in rates
        if float(found["rate"]) == rate and found["itl_ms"]["p99"] is not None
    ]


def read_others(path: Path) -> dict[str, list[Rate]]:
    """Figures of other servers, by name: JSON objects, one a line, perhaps after a word, with name, rate, ttft_ms and
    itl_ms as `rate_figures` has them. Other lines are passed over."""
    found: dict[str, list[Rate]] = {}
    for line in path.read_text().splitlines():
        _, brace, rest = line.partition("{")
        if brace and '"ttft_ms"' in rest and '"name"' in rest:
            rate = json.loads(brace + rest)
            found.setdefault(rate["name"], []).append(rate)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add_load_options(parser, seconds=20.0)
    parser.add_argument("--name", default="", help="of the server, in the output")
    parser.add_argument("--vary", default="", metavar="SECTION.KEY=VALUE,...", help="a server for each of these values")
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    parser.add_argument("--beside", type=Path, help="figures of other servers for the plot, JSON objects one a line")
    arguments = parser.parse_args()
    key, _, values = arguments.vary.partition("=")
    results: dict[str, dict[str, list[Rate]]] = {}
    with tempfile.TemporaryDirectory(prefix="open") as folder:
        content = server_config(arguments, Path(folder))
        for value in values.split(",") if values else [""]:
            own = varied(content, key, yaml.safe_load(value)) if value else content
            name = f"{arguments.name or label(arguments)}{f', {key} {value}' if value else ''}"
            with served(arguments, own) as url:
                results[name] = asyncio.run(measure(url, arguments))
    others = read_others(arguments.beside) if arguments.beside else {}
    for mix in dict.fromkeys(load.mix for load in arguments.loads):
        print(f"\n{mix}\n", *markdown({name: found[mix] for name, found in results.items()}), sep="\n")
    last = arguments.loads[-1]
    if arguments.plot:
        by_server = {name: found[last.mix] for name, found in results.items()}
        arguments.plot.write_text(plot(by_server, others, last.rates[-1]))
    print(json.dumps({"bench": "open_loop", "machine": machine(), "seed": arguments.seed, "results": results}))


if __name__ == "__main__":
    main()
