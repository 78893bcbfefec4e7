"""Where first tokens spend their time while requests arrive by a clock, and whether steps take what they should.

    python -m tests.bench.open_loop_legs [--rates 1 2]                       # the embedded pair on this CPU
    python -m tests.bench.open_loop_legs --gpu --rates 4 12 20 --seconds 15

The requests of `tests.bench.open_loop`, each traced as in `tests.bench.first_token`. Of each rate two Markdown tables:
the legs of all first tokens, and the steps by what they held, with what the costs promised, what they took on the
device, and how long the device had been idle before. Then one JSON line.
"""

import argparse
import asyncio
import bisect
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deploy.bench.arrivals import Traffic
from deploy.bench.figures import percentile
from deploy.bench.load import WARM_UP, Target, run_rate
from deploy.bench.table import table
from tests.bench.legs import LEGS, Exchange, durations, summary
from tests.bench.machine import machine
from tests.bench.open_loop import LARGE, SMALL, lengths, served_model
from tests.bench.served import running
from tests.bench.served_model import add_options, label, prompt_ids, server_config
from tests.bench.stamps import REQUEST_ID, Stamp, read, write_hook

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


async def trace(url: str, folder: Path, traffic: Traffic, rates: Sequence[float], drain_s: float) -> dict[str, Any]:
    """Legs and steps of each rate, after a warm-up."""
    target, number, results = Target(url, served_model(url)), 0, {}
    warm = traffic.arrivals(1000.0)[:WARM_UP]
    for _ in range(2):
        await run_rate(target, warm, drain_s)
    for rate in rates:
        arrivals = traffic.arrivals(rate)
        numbers = range(number, number + len(arrivals))
        number += len(arrivals)
        answers, begin_s = await run_rate(target, arrivals, drain_s, [f"{REQUEST_ID}{n}" for n in numbers])
        faults = [answer.fault for answer in answers if answer.fault]
        if faults:
            raise RuntimeError(f"{url}: {len(faults)} of {len(answers)} requests failed: {faults[0]}")
        exchanges = [
            Exchange(n, int(answer.sent_s * 1e9), int(answer.event_s[0] * 1e9))
            for n, answer in zip(numbers, answers, strict=True)
        ]
        stamps = list(read(folder))
        legs = durations(stamps, exchanges)
        last_s = max(answer.end_s for answer in answers)
        results[f"{rate:g}"] = {
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
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0], help="requests per second, one after another")
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals at each rate")
    parser.add_argument("--drain", type=float, default=60.0, help="seconds after the last arrival")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a file for every request's legs and every step")
    arguments = parser.parse_args()
    prompts, answers = LARGE if arguments.gpu else SMALL
    ids = prompt_ids(arguments)
    traffic = Traffic(lengths(prompts), lengths(answers), arguments.seconds, 5000, ids.start, ids.stop, arguments.seed)
    options = ["--no-haproxy"] if arguments.no_haproxy else []
    with tempfile.TemporaryDirectory(prefix="legs") as name:
        folder = Path(name)
        content, hook = server_config(arguments, folder), write_hook(folder / "stamps")
        limit_s = arguments.start_limit
        with running("deploy.cli serve", content, *options, ready_limit_s=limit_s, python_path=[hook]) as server:
            results = asyncio.run(trace(server.url, folder / "stamps", traffic, arguments.rates, arguments.drain))
    for rate, found in results.items():
        print(f"\n{label(arguments)}, {rate}/s\n", *leg_table(found["legs"]), "", *step_table(found["steps"]), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(results))
    whole = {rate: found["legs"] for rate, found in results.items()}
    print(json.dumps({"bench": "open_loop_legs", "machine": machine(), "model": label(arguments), "results": whole}))


if __name__ == "__main__":
    main()
