"""Seconds from `aerie serve` to the first answer with everything installed, phase by phase."""

import re
import time

import httpx

from deploy.bench.table import table
from tests.bench.finding import Finding, Report
from tests.bench.served import RunningServer, embedded_config, model_name, running

LIMIT_S = 60.0
_PHASE = re.compile(r"^(?:\(.*?\) )?(.{22}) *(\d+\.\d) s$")  # `cluster.replica.plan_report.phase_line`
# A part of the console's line -> the phase that it ends.
_MILESTONES = (
    ("cluster     ", "configuration checked"),
    ("Started a local Ray instance", "Ray started"),
    ("Started Serve in namespace", "Serve started"),
    ("placed, imported", "engine placed, ranks imported"),
    ("built  ", "ranks built"),
    ("ready in", "engine ready"),
)


def run(quick: bool) -> Report:
    """One start, whether `quick` or not."""
    with running("deploy.cli serve", embedded_config()) as server:
        answer_s = _first_answer(server)
        stopping_s = time.perf_counter()
    stopping_s = time.perf_counter() - stopping_s
    rows, last_s = [], 0.0
    for name, at_s in [*_milestones(server), ("/health answers 200", server.ready_s), ("first answer", answer_s)]:
        rows.append((name, f"{at_s:.1f}", f"{at_s - last_s:.1f}"))
        last_s = at_s
    inside = [(m[1].strip(), f"{float(m[2]):.1f}") for _, line in server.lines if (m := _PHASE.match(line))]
    return Report(
        {"startup": Finding(server.ready_s, LIMIT_S, "s")},
        [
            *table(["phase", "ended at s", "took s"], rows),
            "",
            "as the engine and rank 0 report it:",
            "",
            *table(["phase", "s"], inside),
            "",
            f"Ctrl-C to the end of the last process: {stopping_s:.1f} s",
        ],
        {
            "ended_at_s": {name: float(at) for name, at, _ in rows},
            "reported_s": {n: float(s) for n, s in inside},
            "stop_s": round(stopping_s, 1),
        },
    )


def _milestones(server: RunningServer) -> list[tuple[str, float]]:
    """In the order of time; lines of several processes reach the console late or not quite in order."""
    found = [
        (name, next(at_s for at_s, line in server.lines if text in line))
        for text, name in _MILESTONES
        if any(text in line for _, line in server.lines)
    ]
    return sorted(found, key=lambda each: each[1])


def _first_answer(server: RunningServer) -> float:
    body = {"model": model_name(server), "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    return time.perf_counter() - server.started_s
