"""What is made of Serve's HAProxy configuration and command line, and the stand-in for one that dies; HAProxy itself is
run in tests/deploy/haproxy/test_haproxy_edge.py and tests/e2e/test_serve_faults.py."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aerie.deploy import haproxy
from aerie.deploy.haproxy import RETRY_AFTER_S, rewritten, start_arguments, write_error_files, write_script
from aerie.deploy.serve import watches
from aerie.deploy.serve.watches import HaproxyWatch

ROUTES = """defaults
    mode http
    errorfile 502 /tmp/500.http
    errorfile 503 /tmp/500.http
frontend http_frontend
    bind 127.0.0.1:8000
    # Routes are use_backend rules.
    use_backend http-aerie if is_http-aerie
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \\'%[path]\\' not found."
backend http-aerie
    default-server inter 1s
    server ingress 127.0.0.1:30000 check
    # Fallback to head node's Serve proxy when no ingress replicas are available
    server SERVE_PROXY 127.0.0.1:8500 check backup
"""
PORTS = 8001, 8002, 8003
NO_ROUTES = ROUTES.replace("    use_backend http-aerie if is_http-aerie\n", "")


def test_what_no_ingress_answers_is_503_and_no_python_proxy_answers_instead(tmp_path: Path) -> None:
    config = rewritten(ROUTES, tmp_path, None, PORTS)
    write_error_files(tmp_path)
    for status in (502, 503, 504):
        (line,) = [line for line in config.splitlines() if f"errorfile {status} " in line]
        answer = Path(line.split()[2]).read_bytes().decode()
        assert answer.startswith("HTTP/1.1 503 ") and f"Retry-After: {RETRY_AFTER_S}\r\n" in answer
        assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["code"] == "service_unavailable"
    assert "server ingress 127.0.0.1:30000 check\n" in config and "SERVE_PROXY 1" not in config
    assert "inter 1s tcp-ut 8s\n" in config and "srvtcpka" in config, "a host without power says nothing"
    assert "status 404" in config, "a path of no application stays unknown while there are applications"


def test_without_routes_the_last_ones_stay_and_before_the_first_nothing_is_not_found(tmp_path: Path) -> None:
    assert rewritten(NO_ROUTES, tmp_path, "use_backend before", PORTS) == "use_backend before"
    first = rewritten(NO_ROUTES, tmp_path, None, PORTS)
    (line,) = [
        line for line in first.partition("backend default_backend\nb")[2].splitlines() if "request return" in line
    ]
    assert "status 503" in line and line.endswith(f'hdr Retry-After "{RETRY_AFTER_S}"')
    assert json.loads(line.split("'")[1])["error"]["type"] == "service_unavailable_error"


def test_a_route_without_servers_keeps_its_last_ones_and_requests_wait_for_the_next_haproxy(tmp_path: Path) -> None:
    """Serve names no ingress while it builds what an update deploys; those that it has serve on."""
    two = ROUTES + "backend http-other\n    server b 127.0.0.1:30001 check\n"
    other = "backend http-other\n    server b 127.0.0.1:30001 check\n"
    last = rewritten(two, tmp_path, None, PORTS)
    assert _listens_and_waits(last) == (8001, [8002, 8003]) and _servers(last) == ["ingress 127.0.0.1:30000 check"]
    assert last.endswith(other), "nothing is routed there"
    nobody = two.replace("    server ingress 127.0.0.1:30000 check\n", "")
    kept = rewritten(nobody, tmp_path, last, PORTS)
    assert _listens_and_waits(kept) == (8002, [8001, 8003])
    assert _servers(kept) == ["ingress 127.0.0.1:30000 check inter 200ms fall 1 rise 1"]
    again = rewritten(nobody, tmp_path, kept, PORTS)
    assert _listens_and_waits(again) == (8003, [8001, 8002]) and _servers(again) == _servers(kept)
    moved = rewritten(two.replace("30000", "30005"), tmp_path, again, PORTS)
    assert moved == last.replace("30000", "30005")
    assert _servers(rewritten(nobody, tmp_path, None, PORTS)) == [], "there never was one"


def _servers(config: str) -> list[str]:
    section = config.partition("backend http-aerie\n")[2].partition("backend http-other\n")[0]
    lines = [line.strip().removeprefix("server ") for line in section.splitlines() if line.startswith("    server ")]
    return [line for line in lines if not line.startswith("aerie-next")]


def _listens_and_waits(config: str) -> tuple[int, list[int]]:
    waits = re.findall(r"server aerie-next-\d+ 127.0.0.1:(\d+) ", config)
    _, listens = re.findall(r"bind 127.0.0.1:(\d+)", config)
    return int(listens), [int(port) for port in waits]


def test_a_haproxy_that_is_left_hands_its_port_over() -> None:
    assert start_arguments(["-db", "-f", "c"], []) == ["-db", "-f", "c"]
    assert start_arguments(["-db", "-f", "c"], [7]) == ["-db", "-f", "c", "-sf", "7"]
    serves = ["-f", "c", "-sf", "5", "-x", "socket"]
    assert start_arguments(serves, [5]) == serves
    assert start_arguments(serves, [5, 7]) == ["-f", "c", "-sf", "7", "5", "-x", "socket"]


FAKE = """#!/bin/sh
echo "$@" >> {log}
exec sleep 60
"""


@pytest.mark.skipif(sys.platform != "linux", reason="HAProxy's wheel is for Linux")
def test_a_dead_haproxy_gets_a_stand_in_with_its_last_routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "_STARTED_S", 0.1)
    log, node = tmp_path / "log", tmp_path / "node"
    node.mkdir()
    # `sleep` forgets its arguments; the test's own command line stands for HAProxy's.
    monkeypatch.setattr(watches, "living", lambda pid_file: _living(pid_file))
    binary = tmp_path / "binary"
    binary.write_text(FAKE.format(log=log))
    binary.chmod(0o700)
    config = node / "haproxy.cfg"
    config.write_text("    stats socket /s/admin.sock mode 666\n" + ROUTES)
    script = write_script(tmp_path, str(binary), PORTS)
    serves = subprocess.Popen([str(script), "-db", "-f", str(config)])
    said: list[str] = []
    watch = HaproxyWatch(tmp_path, str(binary), said.append)
    try:
        _until(lambda: log.exists())
        watch.start()
        time.sleep(3 * HaproxyWatch.period_s)
        assert not said
        serves.kill()
        serves.wait()
        _until(lambda: bool(said))
        stand_in = int((node / "aerie-stand-in.pid").read_text())
        assert str(stand_in) in said[0]
        assert "stats socket /s/s mode" in (node / "aerie-stand-in.cfg").read_text()
        assert "use_backend" in (node / "aerie-stand-in.cfg").read_text()
        time.sleep(3 * HaproxyWatch.period_s)
        assert len(said) == 1, "one is enough"
        os.kill(stand_in, signal.SIGKILL)
    finally:
        watch.stop()
        serves.kill()
        for name in ("aerie.pid", "aerie-stand-in.pid"):
            pid = _living(node / name)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        if watch._process is not None:
            watch._process.wait()


def _living(pid_file: Path) -> int | None:
    try:
        pid = int(pid_file.read_text())
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return None
    return pid if state != "Z" else None


def _until(reached: object) -> None:
    deadline = time.monotonic() + 20
    while not reached():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_how_many_streams_few_open_files_allow_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy.resource, "getrlimit", lambda _: (256, 1024))
    line = haproxy.open_files_warning()
    assert line is not None and "hard limit of 1024 allows 401 streams at once" in line and "ulimit -Hn" in line
    monkeypatch.setattr(haproxy.resource, "getrlimit", lambda _: (1024, 524_288))
    assert haproxy.open_files_warning() is None
