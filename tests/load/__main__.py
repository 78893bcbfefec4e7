"""Runs scenarios one after the other; see `tests.load`.

    make load                                          # all but the short one and the soak
    python -m tests.load --only kill-worker across --times 3
    python -m tests.load --list

For each a timeline on stdout, NAME.json and NAME.svg in --out with the consoles of its processes, and a row of the
table table.md. Ends with 1 if an expectation was missed, and with 0 and the reason where namespaces are not allowed.
Those named gpu-... have GPUs on their nodes, and are left out with the reason where this machine has too few:

    python -m tests.load --only gpu-across gpu-across-peer gpu-kill-worker-across gpu-replicas-kill gpu-replicas-power
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from tests.load.sandbox import run_inside, unavailable


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="scenarios (default: all but `short` and `soak`)"
    )
    parser.add_argument("--times", type=int, default=1, help="runs of each")
    parser.add_argument(
        "--out", type=Path, default=Path("build/load"), help="folder for what is written (default: build/load)"
    )
    parser.add_argument(
        "--start-limit", type=float, default=240.0, metavar="S", help="seconds until it must serve (default: 240)"
    )
    parser.add_argument("--list", action="store_true", help="print the scenarios and end")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    from tests.load.matrix import SCENARIOS, find

    if arguments.list:
        for scenario in SCENARIOS:
            print(f"{scenario.name:24} {scenario.says}")
        return 0
    try:
        scenarios = find(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    if not arguments.inside:
        reason = unavailable(wires=any(scenario.hosts.wired for scenario in scenarios))
        if reason:
            print(f"skipped: {reason}", file=sys.stderr)
            return 0
        return run_inside(["-m", "tests.load", "--inside", *sys.argv[1:]])
    return max(
        [_run(scenario, arguments.out, arguments.start_limit) for scenario in scenarios for _ in range(arguments.times)]
    )


def _run(scenario, out: Path, start_limit_s: float) -> int:  # type: ignore[no-untyped-def]
    from tests.load.gpus import too_few, visible_gpus
    from tests.load.report import HEAD, as_json, plot, row, timeline
    from tests.load.run import machine_load, run
    from tests.load.verdict import figures

    reason = too_few(scenario.hosts, visible_gpus(os.environ)) if scenario.hosts.gpus else ""
    if reason:
        print(f"skipped: {scenario.name}: {reason}", file=sys.stderr)
        return 0
    print(f"=== {scenario.name}: {scenario.says}, {time.strftime('%H:%M:%S')}, {machine_load()}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    table = out / "table.md"
    if not table.exists():
        table.write_text(HEAD + "\n")
    machine = machine_load()
    try:
        observed = run(scenario, out, start_limit_s)
    except RuntimeError as error:
        print(error, flush=True)
        with table.open("a") as file:
            file.write(f"| {scenario.name} | | | | | | | | could not be run: {str(error).splitlines()[0]} |\n")
        return 1
    found = figures(observed, scenario.expect)
    print(timeline(observed))
    line = row(scenario, found, observed)
    print(f"{HEAD}\n{line}\nmissed: {found.missed}", flush=True)
    with table.open("a") as file:
        file.write(line + "\n")
    (out / f"{scenario.name}.json").write_text(json.dumps(as_json(scenario, observed, found, machine)))
    (out / f"{scenario.name}.svg").write_text(plot(scenario, observed))
    return 1 if found.missed else 0


if __name__ == "__main__":
    sys.exit(main())
