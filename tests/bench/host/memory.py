"""Memory of a served embedded pair, process by process, after it has answered a few dozen requests."""

import concurrent.futures

import httpx

from aerie.deploy.bench.figures import table
from tests.bench.host.finding import Finding, Report
from tests.bench.served import RunningServer, embedded_config, model_name, running

LIMIT_GB = 6.0
NUM_REQUESTS = 32


def run(quick: bool) -> Report:
    """PSS is what is asked: pages that several processes share count once. RSS counts them in each, USS in none."""
    with running("aerie.deploy.cli serve", embedded_config()) as server:
        _use(server, 2 if quick else NUM_REQUESTS)
        rows = []
        for group, processes in server.groups().items():
            used = [process.memory_full_info() for process in processes]
            rows.append((group, len(used), *(sum(getattr(u, kind) for u in used) / 1e6 for kind in _KINDS)))
    rows.sort(key=lambda row: -row[2])
    total = ("sum", sum(row[1] for row in rows), *(sum(row[i] for row in rows) for i in (2, 3, 4)))
    return Report(
        {"memory_pss": Finding(total[2] / 1e3, LIMIT_GB, "GB")},
        table(["MB", "processes", "PSS", "USS", "RSS"], [*rows, total]),
        {
            name: dict(zip(("processes", "pss_mb", "uss_mb", "rss_mb"), (count, *map(round, sizes)), strict=True))
            for name, count, *sizes in [*rows, total]
        },
    )


_KINDS = ("pss", "uss", "rss")


def _use(server: RunningServer, num_requests: int) -> None:
    """Eight clients at once."""
    model = model_name(server)

    def ask(number: int) -> None:
        messages = [{"role": "user", "content": f"What is {number} plus {number + 3}?"}]
        body = {"model": model, "messages": messages, "max_tokens": 48, "temperature": 0}
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()

    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        list(clients.map(ask, range(num_requests)))
