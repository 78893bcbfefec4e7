"""`aerie serve` while its own processes, Ray's or HAProxy are killed. `make test-faults` runs it."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.serve_process import ServeProcess, assert_nothing_left, body, serve_process, until
from tests.support import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow]
# Serve's default limit is 5 s. The controller is the first process that imports the module, the proxy the second.
SLOW_IMPORT = """
import sys, time
from importlib.abc import MetaPathFinder

class Slow(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "ray.serve._private.haproxy" and "default_worker.py" in " ".join(sys.argv):
            with open({marks!r}, "a+") as marks:
                marks.write("x")
                marks.flush()
                if marks.tell() == 2:
                    time.sleep(12)

sys.meta_path.insert(0, Slow())
"""


def _stream(server: ServeProcess, max_tokens: int, out: list[str], started: threading.Event) -> None:
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body(max_tokens) | {"stream": True}, timeout=120
    ) as stream:
        for line in stream.iter_lines():
            if line:
                out.append(line)
                started.set()


@pytest.mark.parametrize("to_group", [True, False])
def test_sigterm_to_the_process_group_or_a_killed_parent_drains_and_leaves_nothing(
    tmp_path: Path, to_group: bool
) -> None:
    with serve_process(tmp_path) as server:
        started = server.below()
        lines: list[str] = []
        first = threading.Event()
        reader = threading.Thread(target=_stream, args=(server, 600, lines, first), daemon=True)
        reader.start()
        assert first.wait(60)
        sent_s = time.monotonic()
        if to_group:
            os.killpg(server.process.pid, signal.SIGTERM)
        else:
            server.process.kill()
        refused = _when_draining(server)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1, refused.text
        reader.join(90)
        assert lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2]
        done_s = time.monotonic()
        assert server.process.wait(60) == (0 if to_group else -signal.SIGKILL)
        assert_nothing_left(server, started, 15)
        print(f"stream ended {done_s - sent_s:.1f} s after the signal, all processes {time.monotonic() - sent_s:.1f} s")


def _when_draining(server: ServeProcess) -> httpx.Response:
    deadline = time.monotonic() + 20
    while (answer := server.complete(1)).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer


@pytest.mark.parametrize("name", ["raylet/raylet", "gcs/gcs_server"])
def test_without_ray_it_ends_with_the_reason_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    with serve_process(tmp_path) as server:
        started = server.below()
        (victim,) = [process for process in server.find(name) if process.cmdline()[0].endswith(name)]
        victim.kill()
        killed_s = time.monotonic()
        assert server.process.wait(15) == 1
        print(f"ended {time.monotonic() - killed_s:.1f} s after {name} was killed")
        assert f"Ray's {name.partition('/')[2]} (pid {victim.pid}) ended with -9" in server.log.read_text()
        assert_nothing_left(server, started, 5)


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with serve_process(tmp_path) as server:
        started = server.below()
        first = threading.Event()
        threading.Thread(target=_try_stream, args=(server, first), daemon=True).start()
        assert first.wait(60)
        os.killpg(server.process.pid, signal.SIGHUP)
        time.sleep(1.5)
        assert server.process.poll() is None
        os.killpg(server.process.pid, signal.SIGTERM)
        assert server.process.wait(20) is not None
        assert_nothing_left(server, started, 5)


def _try_stream(server: ServeProcess, first: threading.Event) -> None:
    with contextlib.suppress(httpx.HTTPError):  # it is cut
        _stream(server, 1900, [], first)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> "object":
    with serve_process(tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.mark.parametrize("victim", ["haproxy", "manager"])
def test_haproxy_or_its_actor_killed_is_back_in_three_seconds_with_its_routes(
    server: ServeProcess, victim: str
) -> None:
    expected = server.complete().json()["choices"][0]["text"]
    if victim == "haproxy":
        for process in server.find("haproxy.cfg"):
            process.kill()
    else:
        for process in server.actors("HAProxyManager"):
            process.kill()
    killed_s = time.monotonic()
    outages, last_good_s, seen = [], killed_s, set()
    while time.monotonic() - killed_s < 25:
        status = server.status("/v1/models", timeout_s=2)
        seen.add(status)
        if status == 200:
            outages.append(time.monotonic() - last_good_s)
            last_good_s = time.monotonic()
        time.sleep(0.02)
    print(f"{victim} killed: longest outage {max(outages):.2f} s; answers seen: {seen}")
    assert time.monotonic() - last_good_s < 3 and max(outages) < 3
    assert seen <= {200, 503, None}
    assert server.complete().json()["choices"][0]["text"] == expected
    until(lambda: len(server.actors("HAProxyManager")) == 1, 20)


def test_a_killed_ingress_is_answered_for_with_503_and_comes_back(server: ServeProcess) -> None:
    expected = server.complete().json()["choices"][0]["text"]
    for process in server.actors("ServeReplica:aerie:Ingress"):
        process.kill()
    killed_s = time.monotonic()
    seen = set()
    while (answer := server.complete(timeout_s=40)).status_code != 200:
        seen.add(answer.status_code)
        assert answer.status_code == 503 and answer.headers["retry-after"], (answer.status_code, answer.text)
        assert answer.json()["error"]["type"] == "service_unavailable_error"
        assert time.monotonic() - killed_s < 60
    print(f"ingress killed: serving again after {time.monotonic() - killed_s:.1f} s; answers until then: {seen}")
    assert answer.json()["choices"][0]["text"] == expected


def test_proxy_that_starts_slowly_is_waited_for(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SLOW_IMPORT.format(marks=str(marks)))
    with serve_process(tmp_path, variables={"PYTHONPATH": f"{folder}:{ROOT}"}) as server:
        assert server.complete().status_code == 200
    assert len(marks.read_text()) >= 2
