"""Seconds from `aerie serve` to the first answer with everything installed, process by process and step by step.

    python -m tests.bench startup --gpu [--shape chain] [--max-running 128] [--runs bare warm restart]

starts dummy weights on a GPU: "bare" with an empty folder for compiled kernels, "warm" with those of the run before.
Beside the steps it prints when each process began, how many graphs were there at readiness, and when the last one was
captured on an idle server; with "restart", how long a rank that is killed then keeps the engine from serving, and on
what. One JSON line at the end.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from aerie.deploy.bench.figures import table
from tests.bench.host.finding import Finding, Report
from tests.bench.served import RunningServer, embedded_config, model_name, running
from tests.bench.served_model import add_options, label, server_config

LIMIT_S = 60.0
GRAPHS_LIMIT_S = 120.0  # for what is captured after readiness
RESTART_LIMIT_S = 120.0
# `aerie.deploy.serve.console.Console`: when, in which process, what, how long.
_STEP = re.compile(r"^ *(\d+\.\d) s  (\S.*?) {2,}(\S.*?) +(\d+\.\d) s$")
_RANK = re.compile(r"(?:^|\) )0 +\S+ +(\d+)  ")  # `aerie.cluster.replica.plan_report.rank_lines`
# A part of the console's line -> what Ray and Serve are done with.
_MILESTONES = (
    ("Started a local Ray instance", "Ray started"),
    ("ServeController pid=", "controller runs"),
    ("Started Serve in namespace", "Serve started"),
    ("Submitted deploy config", "application handed over"),
)
GRAPH_COUNT_S = 5.0  # until the engine's counts have reached the ingress


def run(quick: bool) -> Report:
    """One start, whether `quick` or not."""
    with running("aerie.deploy.cli serve", embedded_config()) as server:
        answer_s = _first_answer(server)
        stopping_s = time.perf_counter()
    stopping_s = time.perf_counter() - stopping_s
    rows = _steps(server, answer_s)
    return Report(
        {"startup": Finding(server.ready_s, LIMIT_S, "s")},
        [
            *table(["ended at s", "process", "step", "took s"], rows),
            "",
            f"Ctrl-C to the end of the last process: {stopping_s:.1f} s",
        ],
        {"steps": rows, "stop_s": round(stopping_s, 1)},
    )


def _steps(server: RunningServer, answer_s: float, since_s: float = 0.0) -> list[tuple[str, str, str, str]]:
    """(when it ended, process, step, what it took) of all that processes said after `since_s`, in the order of time;
    what Ray and Serve say, and what clients see, has no beginning."""
    steps = [
        (float(found[1]), found[2].strip(), found[3].strip(), found[4])
        for _, line in server.lines
        if (found := _STEP.match(line))
    ]
    steps += [(at_s, "Ray, Serve", name, "") for name, at_s in _milestones(server)]
    steps += [(server.ready_s, "client", "/health answers 200", ""), (answer_s, "client", "first answer", "")]
    return [(f"{at_s:.1f}", *rest) for at_s, *rest in sorted(steps) if at_s >= since_s]


def _began(server: RunningServer) -> list[tuple[str, str]]:
    """(when it began, what it is) of the processes that run now."""
    found = [(process.create_time(), name) for name, group in server.groups().items() for process in group]
    return [(f"{at_s - server.started_at_s:.1f}", name) for at_s, name in sorted(found)]


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


def measure(content: dict[str, Any], options: list[str], ready_limit_s: float, restart: bool) -> dict[str, Any]:
    """One start of a server on a GPU, what it captured after that, and if `restart` a rank's end."""
    with running("aerie.deploy.cli serve", content, *options, ready_limit_s=ready_limit_s) as server:
        answer_s = _first_answer(server)
        at_first, began = _first_graphs(server), _began(server)
        rows = _steps(server, answer_s)
        while _graphs(server)[1] and time.perf_counter() - server.started_s < answer_s + GRAPHS_LIMIT_S:
            time.sleep(0.2)
        all_s = time.perf_counter() - server.started_s
        at_last = _graphs(server)
        killed_s = time.perf_counter() - server.started_s
        again_s = _restart(server) if restart else None
    print("\n".join(table(["ended at s", "process", "step", "took s"], rows)))
    print("\n" + "\n".join(table(["began at s", "process"], began)) + "\n")
    for _, line in server.lines:
        if re.search(r"rank 0's memory|ms of a round|WARNING|graph_capture|could not be|by the rank itself", line):
            print(line)
    print(f"graphs captured, waiting: {at_first} at the first answer, {at_last} {all_s - answer_s:.1f} s later")
    restarted = [] if again_s is None else _steps(server, killed_s + again_s, killed_s)
    if again_s is not None:
        print(f"a rank was killed at {killed_s:.1f} s; serving again {again_s:.1f} s later\n")
        print("\n".join(table(["ended at s", "process", "step", "took s"], restarted)))
    return {
        "ready_s": server.ready_s,
        "first_answer_s": answer_s,
        "steps": rows,
        "began": began,
        "graphs_at_first": at_first,
        "graphs_at_last": at_last,
        "all_captured_s": all_s,
        "restart_s": again_s,
        "restart_steps": restarted,
    }


def _first_graphs(server: RunningServer) -> tuple[int, int]:
    """`_graphs` once the engine has told them."""
    deadline_s = time.perf_counter() + GRAPH_COUNT_S
    while (counts := _graphs(server)) == (0, 0) and time.perf_counter() < deadline_s:
        time.sleep(0.05)
    return counts


def _graphs(server: RunningServer) -> tuple[int, int]:
    """How many are captured, and how many are still to be."""
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    values = [
        re.search(rf"^aerie:{name}\{{.*\}} (\S+)$", text, re.M) for name in ("cuda_graphs", "cuda_graphs_waiting")
    ]
    captured, waiting = (int(float(found[1])) if found else 0 for found in values)
    return captured, waiting


def _restart(server: RunningServer) -> float:
    """Kill rank 0; seconds until a request is answered again."""
    found = [match for _, line in server.lines if (match := _RANK.search(line))]
    begun_s = time.perf_counter()
    os.kill(int(found[0][1]), signal.SIGKILL)
    while time.perf_counter() - begun_s < RESTART_LIMIT_S:
        time.sleep(0.1)
        with contextlib.suppress(httpx.HTTPError):
            _first_answer(server)
            return time.perf_counter() - begun_s
    raise RuntimeError(f"the engine did not come back:\n{server.console()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--runs", nargs="+", choices=("bare", "warm", "restart"), default=["bare", "restart"])
    arguments = parser.parse_args()
    options = ["--no-haproxy"] if arguments.no_haproxy else []
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for run_name in arguments.runs:
            content = server_config(arguments, Path(folder))
            if run_name == "bare":
                os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(dir=folder)
            print(f"\n## {label(arguments)}, {run_name}\n", flush=True)
            results[run_name] = measure(content, options, arguments.start_limit, run_name == "restart")
    print(json.dumps({"bench": "startup", "served": label(arguments), "results": results}))


if __name__ == "__main__":
    main()
