"""Where first tokens spend their time while requests arrive by a clock, and whether steps take what they should.

    python -m tests.bench first_token --loads plain:1,2                        # the embedded pair on this CPU
    python -m tests.bench first_token --gpu --loads plain:4,12,20              # Llama-3.1-8B's dimensions on a GPU
    python -m tests.bench first_token --gpu --loads plain:0.5 --prompt-tokens 8 --seconds 60        # an idle server

The servers and requests of `tests.bench.open_loop`, each request traced (`tests.bench.tracing.stamps`). Two Markdown
tables for each rate: the legs of all first tokens; the steps by their prompt tokens, with the time that was predicted,
the time that they took on the device, and how long the device had been idle before. Then one JSON line.
"""

import argparse
import asyncio
import bisect
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aerie.deploy.bench.arrivals import Lengths, Mix
from aerie.deploy.bench.figures import percentile, table
from aerie.deploy.bench.load import WARM_UP, Target, run_rate
from tests.bench.machine import machine
from tests.bench.open_loop import add_load_options, served, served_model, traffic_of
from tests.bench.served_model import add_options, label, server_config
from tests.bench.tracing.legs import LEGS, Exchange, durations, summary
from tests.bench.tracing.stamps import REQUEST_ID, Stamp, read, write_hook

SIZES = (0, 16, 64, 128, 256, 384, 512, 640, 768, 896, 1024, 1536, 2048, 4096, 1 << 30)  # prompt tokens of a class


def steps(stamps: Iterable[Stamp], begin_ns: int, end_ns: int) -> list[dict[str, float]]:
    """The steps that began on the device between two times, by their number: prompt tokens, rounds, promised_ms,
    took_ms (from when it was launched and the step before had ended) and idle_ms (before that)."""
    contents: dict[int, str] = {}
    at: dict[tuple[str, int], int] = {}
    for stamp in stamps:
        if stamp.point == "contents":
            contents[stamp.number] = stamp.name
        elif stamp.point in ("launched", "step_done"):
            at.setdefault((stamp.point, stamp.number), stamp.at_ns)
    found = []
    for number, text in contents.items():
        launched, done, before = (
            at.get(key) for key in (("launched", number), ("step_done", number), ("step_done", number - 1))
        )
        if launched is None or done is None or before is None or not begin_ns <= launched <= end_ns:
            continue
        tokens, rounds, promised = text.split("/")
        found.append(
            {
                "tokens": int(tokens),
                "rounds": int(rounds),
                "promised_ms": float(promised),
                "took_ms": (done - max(launched, before)) / 1e6,
                "idle_ms": max(0, launched - before) / 1e6,
            }
        )
    return found


def step_table(found: Sequence[dict[str, float]]) -> list[str]:
    """A row for each class of prompt tokens."""
    classes: dict[int, list[dict[str, float]]] = defaultdict(list)
    for step in found:
        classes[SIZES[bisect.bisect_left(SIZES, step["tokens"])]].append(step)
    rows = []
    for size, group in sorted(classes.items()):
        rows.append(
            (
                size if size < SIZES[-1] else "more",
                len(group),
                *(f"{statistics.fmean(step[key] for step in group):.2f}" for key in ("rounds", "promised_ms")),
                *(f"{percentile([step['took_ms'] for step in group], q):.2f}" for q in (0.5, 0.99)),
                f"{statistics.median(step['idle_ms'] for step in group):.2f}",
            )
        )
    head = ["prompt tokens up to", "steps", "rounds", "promised, ms", "took p50", "p99", "device idle before, ms"]
    return table(head, rows)


def leg_table(found: dict[str, dict[str, float]]) -> list[str]:
    """A row for each leg."""
    rows = [
        (leg.who, leg.title, round(found[leg.end]["median_us"]), round(found[leg.end]["p99_us"]))
        for leg in LEGS
        if leg.end in found
    ]
    total = ("", "all", round(found["total"]["median_us"]), round(found["total"]["p99_us"]))
    return table(["process", "leg, us", "median", "p99"], [*rows, total])


async def trace(url: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Legs and steps of each load and rate, after a warm-up. Raises RuntimeError if a request fails."""
    target, number, results = Target(url, served_model(url)), 0, {}
    warm = traffic_of(arguments, arguments.loads[0].mix).arrivals(1000.0)[:WARM_UP]
    for _ in range(2):
        await run_rate(target, warm, arguments.drain)
    await asyncio.sleep(arguments.settle)
    for mix, rate in [(load.mix, rate) for load in arguments.loads for rate in load.rates]:
        traffic = traffic_of(arguments, mix)
        if arguments.prompt_tokens:
            fixed = Lengths(arguments.prompt_tokens, 0.0, arguments.prompt_tokens)
            traffic = replace(traffic, mix=Mix(fixed, traffic.mix.answers))
        arrivals = traffic.arrivals(rate)
        numbers = range(number, number + len(arrivals))
        number += len(arrivals)
        answers, begin_s = await run_rate(
            target, arrivals, arguments.drain, request_ids=[f"{REQUEST_ID}{n}" for n in numbers]
        )
        faults = [answer.fault for answer in answers if answer.fault]
        if faults or not answers:
            raise RuntimeError(f"{url}: {len(faults)} of {len(answers)} requests failed: {faults[:1]}")
        exchanges = [
            Exchange(n, int(answer.sent_s * 1e9), int(answer.event_s[0] * 1e9))
            for n, answer in zip(numbers, answers, strict=True)
        ]
        stamps = list(read(folder))
        legs = durations(stamps, exchanges)
        last_s = max(answer.end_s for answer in answers)
        results[f"{mix}, {rate:g}/s"] = {
            "legs": summary(legs),
            "steps": steps(stamps, int(begin_s * 1e9), int(last_s * 1e9)),
            "requests": [
                {"prompt": len(arrival.prompt), **{leg: round(us) for leg, us in one.items()}}
                for arrival, one in zip(arrivals, legs, strict=True)
            ],
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add_load_options(parser, seconds=15.0)
    parser.add_argument("--prompt-tokens", type=int, help="of every prompt, in place of the mix's")
    parser.add_argument("--json", type=Path, help="a file for every request's legs and every step")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="legs") as name:
        folder = Path(name)
        content, hook = server_config(arguments, folder), write_hook(folder / "stamps")
        with served(arguments, content, [hook]) as url:
            results = asyncio.run(trace(url, folder / "stamps", arguments))
    for load, found in results.items():
        print(f"\n{label(arguments)}, {load}\n", *leg_table(found["legs"]), "", *step_table(found["steps"]), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(results))
    legs = {load: found["legs"] for load, found in results.items()}
    print(json.dumps({"bench": "first_token", "machine": machine(), "model": label(arguments), "results": legs}))


if __name__ == "__main__":
    main()
