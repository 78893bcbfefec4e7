"""`make bench`: measures on this machine what Aerie promises of a CPU; prints tables, then one JSON line.

    python -m tests.bench [--only embedded coordinator http memory startup] [--quick]
    python -m tests.bench --gpu [options of tests.bench.round]

Exits 0 whether the requirements are met or not: it measures. A part that crashes is an error.
"""

import argparse
import importlib
import json
import signal
import subprocess
import sys
from typing import Any

from deploy.bench.table import table
from tests.bench.finding import Report
from tests.bench.machine import BUSY_CORES, busy_cores, machine

# Name -> module with `run(quick) -> Report`; imported when its turn comes.
PARTS = {
    "startup": "tests.bench.startup",
    "memory": "tests.bench.memory",
    "embedded": "tests.bench.embedded",
    "coordinator": "tests.bench.step",
    "http": "tests.bench.http_path",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="measure rounds on a GPU instead; see tests/bench/round.py")
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--quick", action="store_true", help="a trial of each part; its figures mean nothing")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.gpu:
        return subprocess.run([sys.executable, "-m", "tests.bench.round", *rest], check=False).returncode
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part ends the server that it has started
    print(json.dumps(measure(arguments.only, arguments.quick)))
    return 0


def measure(parts: list[str], quick: bool) -> dict[str, Any]:
    """Runs `parts` in turn; returns what the JSON line holds: "machine", "details" and every finding by its name."""
    where = machine()
    print(", ".join(f"{key} {value}" for key, value in where.items()), flush=True)
    reports: dict[str, Report] = {}
    busy_before: dict[str, float] = {}
    for part in parts:
        busy = busy_before[part] = round(busy_cores(), 2)
        if busy > BUSY_CORES:
            print(f"warning: others use {busy:.2f} cores; `{part}` would do better on an idle machine", flush=True)
        report = reports[part] = importlib.import_module(PARTS[part]).run(quick)
        print(f"\n## {part}\n", *report.lines, sep="\n", flush=True)
    findings = {name: finding for report in reports.values() for name, finding in report.findings.items()}
    print(
        "\n## requirements\n",
        *table(
            ["figure", "measured", "unit", "required", "met"],
            [(name, f.value, f.unit, f.rule, "yes" if f.met else "NO") for name, f in findings.items()],
        ),
        sep="\n",
    )
    return {
        "bench": "cpu",
        "quick": quick,
        "machine": where | {"busy_cores_before": busy_before},
        **{name: finding.as_json() for name, finding in findings.items()},
        "details": {part: report.details for part, report in reports.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
