"""One scenario, from an empty network to what was observed. Works inside `tests.load.sandbox` only."""

import asyncio
import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.load import faults
from tests.load.client import Clients, asks
from tests.load.cluster import PORT, Cluster
from tests.load.network import address, network
from tests.load.scenario import Scenario
from tests.load.verdict import Ended, Observed, Usage

USAGE_PERIOD_S = 10.0
RANKS_LIMIT_S = 30.0
TRUTH_S = 3.0  # /health must have been 200 for so long before the reference is made


@dataclasses.dataclass
class Progress:
    """What is printed while a run goes on, and the part of it that the clients' clock knows."""

    clients: Clients
    faults: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    ended: Ended | None = None


def run(scenario: Scenario, keep: Path | None, start_limit_s: float) -> Observed:
    """Start, reference, load with faults, end. Raises RuntimeError if it does not get as far as the load.

    keep: a folder for the consoles. start_limit_s: until it serves."""
    folder = Path(tempfile.mkdtemp(prefix="l"))
    with network() as made:
        cluster = Cluster(made, scenario.hosts, folder)
        try:
            cluster.start()
            clients = Clients([address(node) for node in scenario.hosts.fronts], PORT)
            return asyncio.run(_observe(scenario, cluster, clients, start_limit_s))
        except RuntimeError as error:
            raise RuntimeError(f"{scenario.name}: {error}\n{_last_lines(cluster)}") from error
        finally:
            if keep is not None:
                _keep(cluster, keep, scenario.name)
            cluster.kill_all()
            if cluster.serve is not None:
                cluster.serve.wait()


async def _observe(scenario: Scenario, cluster: Cluster, clients: Clients, start_limit_s: float) -> Observed:
    health = asyncio.create_task(clients.watch_health())
    started_s = time.monotonic()
    await _wait_ready(cluster, clients, start_limit_s)
    _say(f"ready after {time.monotonic() - started_s:.1f} s")
    _say(f"workers on nodes 1, 2, ...: {await _ranks(cluster)}")
    distinct = asks(scenario.load)
    references = await clients.reference(distinct)
    _say(f"reference: {len(distinct)} answers, {sum(len(each.tokens) for each in references.values())} tokens")
    clients.health.clear()
    progress = Progress(clients)
    expect = scenario.expect
    load = asyncio.create_task(clients.load(scenario.load, distinct, references, scenario.load.drain_s))
    await asyncio.sleep(0)
    acts = asyncio.create_task(_act(scenario, cluster, progress))
    ends = asyncio.create_task(_watch_end(cluster, progress))
    watches = [health, ends]
    usage: list[tuple[float, Mapping[str, Usage]]] = []
    if expect.growth is not None:
        watches.append(asyncio.create_task(_watch_usage(cluster, clients, usage)))
    await asyncio.wait([load])
    await acts
    if expect.ends_s is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.1, progress.faults[-1][0] + expect.ends_s - clients.now_s())):
                await asyncio.shield(ends)
    for task in watches:
        task.cancel()
    await asyncio.gather(*watches, return_exceptions=True)
    until_s = max([scenario.load.seconds, *(sent.end_s or 0.0 for sent in clients.sent)])
    return Observed(clients.sent, clients.health, progress.faults, until_s, progress.ended, usage)


async def _wait_ready(cluster: Cluster, clients: Clients, limit_s: float) -> None:
    """Until every front's /health has said 200 for a while. Raises RuntimeError."""
    deadline = time.monotonic() + limit_s
    since = time.monotonic()
    while time.monotonic() - since < TRUTH_S:
        await asyncio.sleep(0.2)
        assert cluster.serve is not None
        if cluster.serve.poll() is not None:
            raise RuntimeError(f"aerie serve ended with {cluster.serve.returncode} before it served")
        if time.monotonic() > deadline:
            raise RuntimeError(f"it did not serve within {limit_s:g} s")
        if not clients.all_healthy():
            since = time.monotonic()


async def _ranks(cluster: Cluster) -> tuple[int, ...]:
    """How many workers lie on each node; waits for those that the scenario wants, of a second engine too. Raises
    RuntimeError."""
    wanted = cluster.hosts.ranks
    deadline = time.monotonic() + RANKS_LIMIT_S
    while True:
        ranks = tuple(len(cluster.find(node, "worker")) for node in range(1, len(cluster.hosts.cpus or (0,)) + 1))
        if wanted in (None, ranks):
            return ranks
        if time.monotonic() > deadline:
            raise RuntimeError(f"workers lie on the nodes as {ranks}, and should as {wanted}")
        await asyncio.sleep(0.2)


async def _act(scenario: Scenario, cluster: Cluster, progress: Progress) -> None:
    for fault in scenario.faults:
        await asyncio.sleep(max(0.0, fault.at_s - progress.clients.now_s()))
        at_s = progress.clients.now_s()
        met = await asyncio.to_thread(faults.apply, fault, cluster)
        progress.faults.append((at_s, f"{fault}{f' ({met})' if met else ''}"))
        _say(f"{at_s:6.1f} s  {progress.faults[-1][1]}")


async def _watch_usage(cluster: Cluster, clients: Clients, usage: list[tuple[float, Mapping[str, Usage]]]) -> None:
    while True:
        usage.append((clients.now_s(), await asyncio.to_thread(cluster.usage)))
        await asyncio.sleep(USAGE_PERIOD_S)


async def _watch_end(cluster: Cluster, progress: Progress) -> None:
    """Notes it when `aerie serve` ends by itself, and what it leaves behind after a second of grace."""
    assert cluster.serve is not None
    while (code := cluster.serve.poll()) is None:
        await asyncio.sleep(0.1)
    at_s = progress.clients.now_s()
    left = cluster.left_behind() if cluster.hosts.cpus is None else []
    if left:
        await asyncio.sleep(1.0)
        left = cluster.left_behind()
    after_s = at_s - (progress.faults[-1][0] if progress.faults else 0.0)
    progress.ended = Ended(code, after_s, tuple(left))
    _say(f"{at_s:6.1f} s  aerie serve ended with {code}, {len(left)} processes left behind")


def _keep(cluster: Cluster, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        for console in cluster.consoles:
            (folder / f"{name}.{console.name}").write_bytes(console.read_bytes())


def _last_lines(cluster: Cluster) -> str:
    return "\n".join(f"--- {console.name}\n{console.read_text()[-2500:]}" for console in cluster.consoles)


def _say(line: str) -> None:
    print(f"    {line}", file=sys.stderr, flush=True)


def machine_load() -> str:
    """How busy this machine is, for a table."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
