"""The process that is signalled in place of the server; see tests/e2e/test_serve_faults.py for the server itself."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux' process trees")

# A server that starts an orphan, as HAProxy becomes one, and drains for as long as it is told; below 0 it does not take
# requests yet, and would drain for ever.
SERVER = """
import signal, subprocess, sys, time
from pathlib import Path
from aerie.deploy.processes.guard import run_guarded

folder, drain_s = Path(sys.argv[1]), float(sys.argv[2])

def serve(ends_by_itself):
    def drain(signum, frame):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with (folder / "signals").open("a") as file:
            file.write(f"{signum} ")
        time.sleep(drain_s if drain_s >= 0 else 300)
        raise SystemExit(7)

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
    orphan = "import subprocess; print(subprocess.Popen(['sleep', '300'], stdout=-3, stderr=-3).pid)"
    pid = subprocess.run([sys.executable, "-c", orphan], capture_output=True, text=True, check=True).stdout
    (folder / "orphan.new").write_text(pid)
    if drain_s >= 0:
        ends_by_itself()
    (folder / "orphan.new").rename(folder / "orphan")
    while True:
        time.sleep(60)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # this test may run under nohup
sys.exit(run_guarded(serve))
"""


class Guarded:
    def __init__(self, folder: Path, drain_s: float) -> None:
        self.folder = folder
        command = [sys.executable, "-c", SERVER, str(folder), str(drain_s)]
        with (folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(command, start_new_session=True, stderr=stderr)
        deadline = time.monotonic() + 60
        while not (folder / "orphan").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.orphan = psutil.Process(int((folder / "orphan").read_text()))
        self.children = psutil.Process(self.process.pid).children(recursive=True)
        assert self.orphan in self.children, "who is orphaned is adopted, and found"

    def signals(self) -> list[int]:
        path = self.folder / "signals"
        return [int(word) for word in path.read_text().split()] if path.exists() else []

    def assert_nothing_left(self) -> None:
        _, alive = psutil.wait_procs(self.children, timeout=30)
        assert not alive


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_group_reaches_the_server_once_and_nothing_is_left(
    tmp_path: Path, sent: signal.Signals
) -> None:
    guarded = Guarded(tmp_path, drain_s=0.3)
    os.killpg(guarded.process.pid, sent)
    os.killpg(guarded.process.pid, sent)  # as `make` and shells pass it on
    assert guarded.process.wait(50) == 7
    assert guarded.signals() == [signal.SIGINT if sent == signal.SIGINT else signal.SIGTERM]
    guarded.assert_nothing_left()


def test_a_server_in_a_shells_background_heeds_sigint(tmp_path: Path) -> None:
    """Which a shell has it ignore, and which never kept `aerie serve` from draining."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        guarded = Guarded(tmp_path, drain_s=0.3)
    finally:
        signal.signal(signal.SIGINT, before)
    os.killpg(guarded.process.pid, signal.SIGINT)
    assert guarded.process.wait(50) == 7 and guarded.signals() == [signal.SIGINT]
    guarded.assert_nothing_left()


def test_a_later_signal_ends_the_server_at_once(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, drain_s=60)
    os.killpg(guarded.process.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + 30
    while not guarded.signals():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    time.sleep(1.3)  # those of one second are taken for one
    os.killpg(guarded.process.pid, signal.SIGTERM)
    assert guarded.process.wait(50) == 128 + signal.SIGINT
    guarded.assert_nothing_left()


def test_a_killed_guard_has_the_server_drain_and_nothing_is_left(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, drain_s=0.3)
    guarded.process.kill()
    guarded.process.wait()
    guarded.assert_nothing_left()
    assert guarded.signals() == [signal.SIGTERM]


def test_a_killed_server_leaves_nothing_and_its_signal_shows(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, drain_s=0.3)
    (server,) = psutil.Process(guarded.process.pid).children()[:1]
    while guarded.orphan.parent() != server and server.is_running():
        time.sleep(0.02)
    server.kill()
    assert guarded.process.wait(50) == 128 + signal.SIGKILL
    guarded.assert_nothing_left()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_before_the_server_takes_requests_ends_it_at_once_in_one_line(
    tmp_path: Path, sent: signal.Signals
) -> None:
    guarded = Guarded(tmp_path, drain_s=-1)
    os.killpg(guarded.process.pid, sent)
    assert guarded.process.wait(50) == 128 + sent
    assert (tmp_path / "stderr").read_text() == f"aerie serve: stopped by {sent.name} before it was ready\n"
    assert guarded.signals() == []
    guarded.assert_nothing_left()
