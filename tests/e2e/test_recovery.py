"""Death and hanging of every part under load. The ranks are scripted: each token follows from seed and position, so a
resumed stream is right exactly if it equals the undisturbed one."""

import asyncio
import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from aerie.cluster.replica.supervisor import WATCH_PERIOD_S
from tests.e2e.serving import Server, actor_pids, engine_stats, serving, wait_idle
from tests.support.scripted import scripted_token

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]

PROMPT = [5, 6, 7]
MAX_RUNNING = 8
RECOVERY_LIMIT_S = 60.0  # process starts on a loaded two-core machine


def _args(**engine: Any) -> dict[str, Any]:
    return {
        "model": {"path": "target", "device": "cpu"},
        "parallel": {"tensor_parallel": 2},
        "scheduler": {"max_running": MAX_RUNNING, "max_waiting": 24},
        "engine": engine,
    }


@pytest.fixture(scope="module")
def server(ray_port: int, folder: Path) -> Iterator[Server]:
    with serving(ray_port, _args(), folder, scripted=True) as running:
        yield running


@dataclasses.dataclass
class Outcome:
    """What one stream brought, and when it ended (monotonic)."""

    tokens: list[int]
    error: str | None = None
    ended_s: float = 0.0


async def _stream(client: httpx.AsyncClient, server: Server, seed: int, max_tokens: int) -> Outcome:
    outcome = Outcome([])
    body = {
        "model": server.model,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "seed": seed,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    async with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            outcome.error = f"{answer.status_code} {await answer.aread()!r}"
        async for line in answer.aiter_lines():
            event = line.removeprefix("data: ")
            if not event or event == "[DONE]":
                continue
            document = json.loads(event)
            if "error" in document:
                outcome.error = document["error"]["message"]
            for choice in document.get("choices", []):
                outcome.tokens += choice.get("token_ids") or []
    outcome.ended_s = time.monotonic()
    return outcome


def _run_with_fault(
    server: Server,
    victims: list[int],
    fault: signal.Signals,
    count: int = 6,
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[list[Outcome], float]:
    """`count` streams of more than a second, a signal to each of `victims` once all of them run or wait; when it was
    sent. meanwhile: called right after it."""

    async def run() -> tuple[list[Outcome], float]:
        async with httpx.AsyncClient(timeout=120) as client:
            streams: list[asyncio.Task[Outcome]] = []
            for seeds in range(min(count, MAX_RUNNING)), range(MAX_RUNNING, count):  # all at once, too many would wait
                streams += [asyncio.create_task(_stream(client, server, seed, 300)) for seed in seeds]
                await _all_begun(streams)
            sent_s = time.monotonic()
            for pid in victims:
                os.kill(pid, fault)
            await asyncio.to_thread(meanwhile)
            return await asyncio.gather(*streams), sent_s

    outcomes, sent_s = asyncio.run(run())
    assert sum(outcome.ended_s > sent_s for outcome in outcomes) > count / 2, "most streams had ended before the fault"
    return outcomes, sent_s


async def _all_begun(streams: list[asyncio.Task[Outcome]]) -> None:
    """Wait until the engine has, or has had, all these requests, and runs as many as it may."""
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    while True:
        (stats,) = await asyncio.to_thread(engine_stats)
        known = stats.num_running + stats.num_waiting + sum(stream.done() for stream in streams)
        if known >= len(streams) and stats.num_waiting <= max(0, len(streams) - MAX_RUNNING):
            return
        assert time.monotonic() < deadline, f"not {len(streams)} requests: {stats}"
        await asyncio.sleep(0.02)


def _assert_all_complete(outcomes: list[Outcome]) -> None:
    for seed, outcome in enumerate(outcomes):
        expected = [scripted_token(seed, position) for position in range(len(PROMPT), len(PROMPT) + 300)]
        assert outcome.error is None
        assert outcome.tokens == expected, f"seed {seed}: lost, repeated or wrong tokens"


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_worker_loses_no_token(server: Server, rank: int) -> None:
    """Until there are others, /health is bad and says that the engine recovers."""
    workers = actor_pids("WorkerActor")
    assert len(workers) == 2

    def recovering() -> bool:
        status, health = server.health()  # its statistics may be half a second older than its status
        return status == 503 and health["engines"][0]["status"] == "recovering"

    outcomes, _ = _run_with_fault(server, [workers[rank]], signal.SIGKILL, meanwhile=lambda: _until(recovering))
    _assert_all_complete(outcomes)
    server.wait_healthy(RECOVERY_LIMIT_S)
    assert wait_idle().num_worker_restarts >= 1


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_stopped_worker_is_noticed_and_replaced(server: Server, rank: int) -> None:
    """Long before a step's time limit, and by its own name."""
    pid = actor_pids("WorkerActor")[rank]
    outcomes, sent_s = _run_with_fault(server, [pid], signal.SIGSTOP, count=3)
    _assert_all_complete(outcomes)
    print(f"rank {rank} stopped at work: streams ended {max(o.ended_s for o in outcomes) - sent_s:.1f} s later")
    server.wait_healthy(RECOVERY_LIMIT_S)
    wait_idle()


@pytest.mark.slow
def test_stopped_worker_is_noticed_while_idle(server: Server) -> None:
    pid = actor_pids("WorkerActor")[1]
    os.kill(pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    answer = _until_unhealthy(server)
    seen_s = time.monotonic() - stopped_s
    assert f"(pid {pid} on node" in answer["error"]["message"], answer
    server.wait_healthy(RECOVERY_LIMIT_S)
    print(f"stopped idle: /health bad after {seen_s:.1f} s, good after {time.monotonic() - stopped_s:.1f} s")


@pytest.mark.slow
def test_stopped_engine_replica_is_answered_for_and_replaced(server: Server) -> None:
    (pid,) = actor_pids("ServeReplica:aerie:Engine")
    outcomes, sent_s = _run_with_fault(server, [pid], signal.SIGSTOP, count=3)
    _assert_all_complete(outcomes)  # tokens do not pass through it
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 2}
    slowest_s, seen = 0.0, set()
    while actor_pids("ServeReplica:aerie:Engine") == [pid] or server.health()[0] != 200:
        asked_s = time.monotonic()
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
        seen.add(answer.status_code)
        if answer.status_code != 200:
            assert answer.status_code == 503 and answer.headers["retry-after"], answer.text
        slowest_s = max(slowest_s, time.monotonic() - asked_s)
        assert time.monotonic() - sent_s < RECOVERY_LIMIT_S
    print(f"engine stopped: slowest answer {slowest_s:.1f} s, {seen}; replaced {time.monotonic() - sent_s:.1f} s later")
    assert slowest_s < 10
    wait_idle()


def test_killed_coordinator_loses_no_request_no_token_and_no_count(server: Server) -> None:
    """Eight run and the queue is full, and stays so while what ran joins it."""
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    before = engine_stats()[0]
    time.sleep(3 * WATCH_PERIOD_S)  # the supervisor looks at the counters so often, whatever happens
    outcomes, _ = _run_with_fault(server, actor_pids("EagleCoordinator"), signal.SIGKILL, count=32)
    _assert_all_complete(outcomes)
    server.wait_healthy(RECOVERY_LIMIT_S)
    after = wait_idle()
    assert after.engine_id != before.engine_id
    assert before.scheduler is not None and after.scheduler is not None
    assert after.scheduler.e2e_s.total >= before.scheduler.e2e_s.total > 0
    assert after.num_worker_restarts > before.num_worker_restarts


def test_killed_engine_replica_loses_no_token(server: Server) -> None:
    engines = actor_pids("ServeReplica:aerie:Engine")
    assert len(engines) == 1
    outcomes, _ = _run_with_fault(server, engines, signal.SIGKILL, count=3)
    _assert_all_complete(outcomes)
    # until Serve sees it, requests are answered without one; a killed process goes late where no core is free
    _until(lambda: bool(set(actor_pids("ServeReplica:aerie:Engine")) - {*engines}))
    server.wait_healthy(RECOVERY_LIMIT_S)
    wait_idle()


def test_overload_is_refused_with_retry_after(server: Server) -> None:
    async def run() -> list[httpx.Response]:
        body = {"model": server.model, "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            return await asyncio.gather(
                *(client.post(f"{server.url}/v1/completions", json=body | {"seed": seed}) for seed in range(60))
            )

    answers = asyncio.run(run())
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert all(float(answer.headers["retry-after"]) > 0 and answer.json()["error"]["message"] for answer in refused)
    wait_idle()


def test_drained_application_ends_its_streams(ray_port: int, folder: Path, server: Server) -> None:
    from ray import serve

    async def run() -> Outcome:
        async with httpx.AsyncClient(timeout=60) as client:
            stream = asyncio.create_task(_stream(client, server, 1, 300))
            await _all_begun([stream])
            await asyncio.to_thread(serve.delete, "aerie")
            return await stream

    _assert_all_complete([Outcome([scripted_token(0, p) for p in range(3, 303)]), asyncio.run(run())])


@pytest.fixture(scope="module")
def strict(ray_port: int, folder: Path, server: Server) -> Iterator[Server]:
    """Ends streams when a worker dies, and keeps spare workers. After the module's other server, which a test has
    deleted by then."""
    with serving(ray_port, _args(on_worker_loss="error", spare_workers=True), folder, scripted=True) as running:
        yield running


@pytest.mark.slow  # `tests.cluster.coordinator.test_worker_loss` has it without processes
def test_error_policy_ends_streams_within_five_seconds(strict: Server) -> None:
    outcomes, sent_s = _run_with_fault(strict, actor_pids("WorkerActor.run")[:1], signal.SIGKILL)
    assert all(outcome.error for outcome in outcomes)
    assert max(outcome.ended_s for outcome in outcomes) - sent_s < 5
    strict.wait_healthy(RECOVERY_LIMIT_S)


def test_spare_workers_take_the_place_of_the_dead(strict: Server) -> None:
    ranks, spares = actor_pids("WorkerActor.run"), _spares(2)
    os.kill(ranks[0], signal.SIGKILL)
    _until(lambda: actor_pids("WorkerActor.run") == spares)  # too soon for /health to be seen bad in between
    ranks, spares = spares, _spares(2)  # others have come after them
    for pid in (*spares, ranks[0]):
        os.kill(pid, signal.SIGKILL)
    _until(lambda: len(found := actor_pids("WorkerActor.run")) == 2 and not set(found) & {*ranks, *spares})
    strict.wait_healthy(RECOVERY_LIMIT_S)


def _spares(count: int) -> list[int]:
    """The spare workers' processes, once there are `count`."""
    pids: list[int] = []

    def found() -> bool:
        pids[:] = sorted(set(actor_pids("WorkerActor")) - set(actor_pids("WorkerActor.run")))
        return len(pids) == count

    _until(found)
    return pids


def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    while not reached():
        assert time.monotonic() < deadline, reached.__name__
        time.sleep(0.05)


def _until_unhealthy(server: Server, limit_s: float = 30) -> dict[str, Any]:
    """Return what /health says once it is bad, which must be soon."""
    deadline = time.monotonic() + limit_s
    while (answer := server.health())[0] == 200:
        assert time.monotonic() < deadline, f"/health stayed good for {limit_s} s after a worker died"
        time.sleep(0.05)
    return answer[1]
