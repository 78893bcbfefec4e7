"""A server's processes are found by its record and ended, with their files; others are left alone. Its processes are
sleeps here; tests/e2e/test_lifecycle.py has real ones."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from aerie.deploy.cli import main
from aerie.deploy.processes import server_record
from aerie.deploy.processes.server_record import (
    VARIABLE,
    Record,
    begin,
    clear,
    clear_abandoned,
    note,
    note_processes,
    processes,
    read,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(120)"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "")
    yield begin(Record("server"))


@pytest.fixture
def sleeper() -> Iterator[Callable[..., psutil.Process]]:
    begun: list[subprocess.Popen[bytes]] = []

    def begin_one(*words: str, **variables: str) -> psutil.Process:
        process = subprocess.Popen([*SLEEP, *words], env=dict(os.environ) | variables, stdout=subprocess.PIPE)
        begun.append(process)
        assert process.stdout is not None and process.stdout.readline()
        return psutil.Process(process.pid)

    yield begin_one
    for process in begun:
        process.kill()
        process.communicate()


def _ended(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_ZOMBIE


def test_processes_are_found_by_their_environment_or_by_number_and_start(
    folder: Path, sleeper: Callable[..., psutil.Process]
) -> None:
    marked, noted, other = sleeper(), sleeper(**{VARIABLE: ""}), sleeper(**{VARIABLE: f"{folder}0"})
    assert processes(folder) == [marked.pid]
    note_processes([noted.pid])
    assert processes(folder) == sorted([marked.pid, noted.pid])
    path = folder / "processes.json"
    path.write_text(path.read_text().replace('"started": "', '"started": "1'))  # another process had the number
    assert processes(folder) == [marked.pid]
    clear(folder)
    assert not folder.exists()
    assert _ended(marked) and not _ended(noted) and not _ended(other)


def test_rays_folder_goes_with_its_last_user(folder: Path, sleeper: Callable[..., psutil.Process]) -> None:
    sessions = [folder.parent / name for name in ("session_noted", "session_seen", "session_of_others", "important")]
    for each in sessions:
        (each / "logs").mkdir(parents=True)
    noted, seen, others, important = sessions
    latest = folder.parent / "session_latest"
    latest.symlink_to(noted)
    note(session=str(noted))
    own = sleeper(f"--session-dir={seen}")
    sleeper(f"--session_dir={others}")
    stranger = sleeper(f"--session_dir={others}", **{VARIABLE: ""})
    clear(folder)
    assert _ended(own) and not _ended(stranger)
    assert not noted.exists() and not seen.exists() and not latest.is_symlink()
    assert others.exists()
    server_record.remove_session(important)
    assert important.exists(), "it is no session of Ray's"


def test_a_start_clears_up_after_killed_servers_and_spares_living_ones_and_nodes(
    folder: Path, sleeper: Callable[..., psutil.Process]
) -> None:
    node = begin(Record("node", port=6379))
    ray = sleeper()  # it has the node's folder in its environment; `ray start` has ended
    killed, kept = begin(Record("server", port=1)), begin(Record("server", port=2, keeps_logs=True))
    gone = subprocess.Popen(["true"])
    for each in (node, killed, kept):
        text = (each / "owner.json").read_text()
        (each / "owner.json").write_text(text.replace(f'"pid": {os.getpid()}', f'"pid": {gone.pid}'))
    gone.wait()
    clear_abandoned(with_logs=False)
    assert [each.exists() for each in (folder, node, killed, kept)] == [True, True, False, True]
    clear_abandoned(with_logs=True)
    assert [each.exists() for each in (folder, node, kept)] == [True, True, False]
    ray.kill()
    ray.wait()
    clear_abandoned(with_logs=True)
    assert [each.exists() for each in (folder, node)] == [True, False]


# A guarded server whose drain takes a while, with a process that would outlive it.
SERVER = """
import os, signal, subprocess, sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from aerie.deploy.processes.guard import run_guarded
from aerie.deploy.processes.server_record import note

def serve(ends_by_itself):
    session = os.path.join(sys.argv[1], f"session_{sys.argv[2]}")
    os.makedirs(session)
    note(port=int(sys.argv[2]), session=session, stop_limit_s=20)
    def drain(number, frame):
        time.sleep(0.3)
        raise SystemExit(0)
    def fail(number, frame):
        raise RuntimeError("a fault")
    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGUSR1, fail)
    ends_by_itself()
    agent = subprocess.Popen(["sleep", "120"], start_new_session=True)
    print(os.getpid(), agent.pid, flush=True)
    time.sleep(120)

sys.exit(run_guarded(serve))
"""


class Server:
    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        command = [sys.executable, "-c", SERVER, str(folder), str(port)]
        self.guard = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.guard.stdout is not None
        self.server, self.agent = (psutil.Process(int(word)) for word in self.guard.stdout.readline().split())

    def is_alive(self) -> bool:
        return self.guard.poll() is None and self.server.is_running() and self.agent.is_running()

    def close(self) -> None:
        for process in (self.server, self.agent):
            if process.is_running():
                process.kill()
        self.guard.kill()
        self.guard.communicate()


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Server]]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    begun: list[Server] = []

    def begin_one(port: int) -> Server:
        begun.append(Server(tmp_path, port))
        return begun[-1]

    yield begin_one
    for server in begun:
        server.close()


def test_stop_ends_the_server_of_a_port_with_its_files_and_no_other(
    servers: Callable[[int], Server], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second, third = servers(8101), servers(8102), servers(8103)
    assert main(["stop", "--port", "8101"]) == 0
    assert first.guard.wait(10) == 0 and not first.agent.is_running()
    assert second.is_alive() and third.is_alive()
    assert "the server of port 8101 has ended" in capfd.readouterr().out
    assert main(["stop", "--port", "8101"]) == 0
    assert capfd.readouterr().out == "nothing that `aerie serve` or `aerie start` started runs here on port 8101\n"
    assert main(["stop", "--now"]) == 0
    for server in (second, third):
        assert server.guard.wait(60) == 128 + signal.SIGKILL and not server.agent.is_running()
    assert list(tmp_path.iterdir()) == []


def test_killed_together_with_its_guard_a_server_leaves_nothing(
    servers: Callable[[int], Server], tmp_path: Path
) -> None:
    server = servers(8101)
    server.guard.kill()
    server.server.kill()
    _until(lambda: not server.agent.is_running() and list(tmp_path.iterdir()) == [])


def test_after_a_fault_rays_folder_stays_until_it_is_stopped(servers: Callable[[int], Server], tmp_path: Path) -> None:
    server = servers(8101)
    server.server.send_signal(signal.SIGUSR1)
    assert server.guard.wait(60) == 1 and not server.agent.is_running()
    time.sleep(0.5)  # the keeper has looked
    assert (tmp_path / "session_8101").is_dir()
    [folder] = tmp_path.glob("aerie-*")
    record = read(folder)
    assert record is not None and record.keeps_logs
    assert main(["stop"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_that_cannot_be_written_is_told_with_the_remedy(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    command = [sys.executable, "-c", SERVER, str(missing), "8101"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1 and "free some space, or set TMPDIR" in ended.stderr


def _until(reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
