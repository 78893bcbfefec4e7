"""Random pairs of the processes of `aerie serve` killed and stopped while streams run: every request ends, and the text
of all that finish is that of an undisturbed run. `make test-faults` runs it; AERIE_FAULT_S: for how long."""

import collections
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.serve_process import ServeProcess, serve_process, until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
FAULT_S = float(os.environ.get("AERIE_FAULT_S", 120))
SEED = int(os.environ.get("AERIE_FAULT_SEED", 0))
CLIENTS = 6
# No request stays longer without an end: one waits 15 s in HAProxy for an ingress, which waits 60 s for an engine.
SILENCE_LIMIT_S = 90.0
PROMPTS = [f"Count from {number} to {number + 9}:" for number in range(CLIENTS)]
VICTIMS = {
    "rank": "aerie-rank",
    "coordinator": "ray::EagleCoordinator",
    "engine": "ray::ServeReplica:aerie:Engine",
    "ingress": "ray::ServeReplica:aerie:Ingress",
    "haproxy": "haproxy.cfg",
    "manager": "ray::HAProxyManager",
    "controller": "ray::ServeController",
    "agent": "dashboard/agent.py",
    "runtime env agent": "runtime_env/agent/main.py",
}


def _processes(server: ServeProcess, victim: str) -> list[psutil.Process]:
    words = VICTIMS[victim]
    found = []
    for process in server.below():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if process.name().startswith(words) or any(
                each.startswith(words) or each.endswith(words) for each in command
            ):
                found.append(process)
    if victim == "rank" and not found:  # a later rank is its actor's own process
        found = server.actors("WorkerActor")
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    with serve_process(tmp_path_factory.mktemp("serve")) as running:
        yield running


def _body(client: int) -> dict[str, Any]:
    return {"model": "target", "prompt": PROMPTS[client], "max_tokens": 80, "temperature": 0, "ignore_eos": True}


class _Clients:
    """Stream one after another until they are told to end. outcomes: how requests ended, and how often."""

    def __init__(self, server: ServeProcess, expected: list[str]) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[tuple[str, str]] = []
        self.longest_s = 0.0
        self._server = server
        self._expected = expected
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(SILENCE_LIMIT_S + 10)

    def _run(self, number: int) -> None:
        while not self._ending.is_set():
            began_s = time.monotonic()
            self.outcomes[self._one(number)] += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    def _one(self, number: int) -> str:
        url, body = f"{self._server.url}/v1/completions", _body(number) | {"stream": True}
        text, ended = [], False
        try:
            with httpx.stream("POST", url, json=body, timeout=httpx.Timeout(SILENCE_LIMIT_S)) as stream:
                if stream.status_code != 200:
                    time.sleep(0.2)
                    return str(stream.status_code)
                for line in stream.iter_lines():
                    if line == "data: [DONE]":
                        ended = True
                    elif line.startswith("data: "):
                        event = httpx.Response(200, text=line.removeprefix("data: ")).json()
                        if "error" in event:
                            return f"error event: {event['error']['type']}"
                        text += [choice["text"] for choice in event["choices"]]
        except httpx.ReadTimeout:
            return "no end"
        except httpx.HTTPError as error:
            time.sleep(0.2)
            return f"cut ({type(error).__name__})"
        if not ended:
            return "cut"
        if "".join(text) != self._expected[number]:
            self.wrong.append((self._expected[number], "".join(text)))
            return "wrong"
        return "whole"


@pytest.fixture
def expected(server: ServeProcess) -> list[str]:
    """The undisturbed text of each client."""
    url = f"{server.url}/v1/completions"
    return [httpx.post(url, json=_body(n), timeout=60).json()["choices"][0]["text"] for n in range(CLIENTS)]


def _check(server: ServeProcess, clients: _Clients, least_whole: int) -> None:
    """Check how requests ended, and that no process is left unwaited for."""
    assert not clients.wrong, clients.wrong[0]
    assert clients.outcomes["no end"] == 0 and clients.longest_s < SILENCE_LIMIT_S, clients.outcomes
    assert clients.outcomes["whole"] >= least_whole
    allowed = {"whole", "503", "429", "cut", "no end"}
    others = {name for name in clients.outcomes if name not in allowed and not name.startswith(("cut", "error event"))}
    assert not others, clients.outcomes
    zombies = [process for process in server.below() if process.status() == psutil.STATUS_ZOMBIE]
    until(lambda: not any(process.is_running() for process in zombies), 15)


def test_engine_haproxy_and_manager_that_fail_together_leave_no_request_without_an_end(
    server: ServeProcess, expected: list[str]
) -> None:
    """Six clients once hung for 300 s after these three: the engine's replica stopped, HAProxy stopped 9 s later, and
    its manager killed 6 s after that. `pytest -s -m slow tests/e2e/test_fault_pairs.py -k together`"""
    clients = _Clients(server, expected)
    try:
        for after_s, number, victim in ((2, signal.SIGSTOP, "engine"), (9, signal.SIGSTOP, "haproxy")):
            time.sleep(after_s)
            found = _processes(server, victim)
            assert found, f"no {victim}"
            for process in found:
                process.send_signal(number)
        time.sleep(6)
        for process in _processes(server, "manager"):
            process.kill()
        at_fault = dict(clients.outcomes)
        back_s = until(lambda: server.status("/health") == 200, 120, server.log.read_text)
        whole = clients.outcomes["whole"]
        until(lambda: clients.outcomes["whole"] >= whole + 2 * CLIENTS, SILENCE_LIMIT_S)
    finally:
        clients.close()
    print(f"until the third fault {at_fault}; /health 200 after {back_s:.1f} s; in all {dict(clients.outcomes)}")
    print(f"longest request {clients.longest_s:.1f} s")
    _check(server, clients, 2 * CLIENTS)


def test_every_request_ends_and_no_text_is_wrong_while_pairs_of_processes_fail(
    server: ServeProcess, expected: list[str]
) -> None:
    chance = random.Random(SEED)
    clients = _Clients(server, expected)
    faults = []
    try:
        began_s = time.monotonic()
        while time.monotonic() - began_s < FAULT_S:
            pair = chance.sample(sorted(VICTIMS), 2)
            for victim in pair:
                number = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                found = _processes(server, victim)
                if found:
                    with contextlib.suppress(psutil.Error):
                        chance.choice(found).send_signal(number)
                    faults.append(f"{time.monotonic() - began_s:.0f} s: {number.name} {victim}")
                    print(faults[-1], flush=True)
                time.sleep(chance.choice([0.0, 0.5, 3.0]))
            back_s = until(lambda: server.status("/health") == 200, 120, server.log.read_text)
            print(f"        /health 200 after {back_s:.1f} s; {dict(clients.outcomes)}", flush=True)
            time.sleep(chance.uniform(1, 5))
    finally:
        clients.close()
    print(f"{len(faults)} faults, {dict(clients.outcomes)}, longest request {clients.longest_s:.1f} s")
    _check(server, clients, 2 * len(faults) + 1)
