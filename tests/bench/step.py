"""The cost of a step outside the model, with workers that answer at once; see `tests.bench.coordinator`."""

from typing import Any, cast

from deploy.bench.table import table
from tests.bench.coordinator import measure
from tests.bench.finding import Finding, Report

PAGE_SIZE, NUM_RANKS = 16, 2


def run(quick: bool) -> Report:
    """One run of 3000 steps, as `python -m tests.bench.coordinator` makes it."""
    num_running, num_steps = (8, 300) if quick else (128, 3000)
    figures = cast(dict[str, Any], measure(num_running, num_steps, PAGE_SIZE, NUM_RANKS))
    step, cpu = figures["step_ms"], figures["coordinator_cpu_ms"]
    columns = ["mean", "median", "p99", "max"]
    rows = [("step", *(step[c] for c in columns)), ("CPU of the coordinator", *(cpu[c] for c in columns))]
    return Report(
        {
            "coordinator_step_median": Finding(step["median"], 0.5, "ms"),
            "coordinator_step_p99": Finding(step["p99"], 2.0, "ms"),
        },
        [
            f"{num_running} running requests, {NUM_RANKS} ranks, {figures['num_steps']} steps",
            "",
            *table(["ms", *columns], rows),
        ],
        figures,
    )
