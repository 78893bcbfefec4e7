"""What `aerie serve` shows to other users of its machine, and what it leaves. `make test-faults` runs it."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.serve_process import ServeProcess, assert_nothing_left, body, serve_process, until
from tests.support.wheel import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow]
KEY = "sk-lifecycle-0123456789-secret"
_READABLE = stat.S_IROTH | stat.S_IXOTH


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A temporary folder that holds nothing else, and a home of its own with a token that everybody may read."""
    folder = Path(tempfile.mkdtemp(prefix="a", dir="/tmp"))
    folder.chmod(0o755)
    token = tmp_path / "home" / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.write_text("0" * 64)
    token.chmod(0o644)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _others_can_read(path: Path, below: Path) -> bool:
    """Whether another user may, by the modes of the file and of the folders up to `below`."""
    if not path.stat().st_mode & stat.S_IROTH:
        return False
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents if parent.is_relative_to(below))


def _with_key(folder: Path) -> list[Path]:
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and KEY.encode() in path.read_bytes():
            found.append(path)
    return found


def test_no_file_and_no_process_shows_a_key_to_others(tmp_path: Path, folders: Path) -> None:
    with serve_process(tmp_path, ray_folder=folders, ingress={"api_keys": [KEY]}) as server:
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, json=body(3), timeout=60).status_code == 401
        assert httpx.post(url, json=body(3), timeout=60, headers={"authorization": f"Bearer {KEY}"}).is_success
        assert _with_key(folders) == [], "not even files of this user's alone"
        readable = [path for path in folders.rglob("*") if path.is_file() and _others_can_read(path, folders)]
        assert readable == [], "logs, sockets, configurations"
        assert (tmp_path / "home" / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
        for process in server.below():
            for name in ("cmdline", "environ"):
                assert KEY.encode() not in Path(f"/proc/{process.pid}/{name}").read_bytes(), process.cmdline()


def _aerie(*words: str) -> "subprocess.CompletedProcess[str]":
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "deploy.cli", *words]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


def test_killed_together_with_its_guard_it_leaves_no_process_and_no_file(tmp_path: Path, folders: Path) -> None:
    with serve_process(tmp_path, ray_folder=folders) as server:
        started = server.below()
        [child] = psutil.Process(server.process.pid).children()
        server.process.kill()
        child.kill()
        killed_s = time.monotonic()
        assert_nothing_left(server, started, 10)
        print(f"all processes had ended {time.monotonic() - killed_s:.1f} s after guard and server were killed")
        until(lambda: _left(folders) == [], 10, lambda: str(_left(folders)))


def test_stop_ends_one_server_and_its_files_while_another_answers(tmp_path: Path, folders: Path) -> None:
    (tmp_path / "other").mkdir()
    with serve_process(tmp_path, ray_folder=folders) as server, serve_process(tmp_path / "other") as other:
        started = server.below()
        ended = _aerie("stop", "--port", str(server.port))
        assert ended.returncode == 0 and "has ended" in ended.stdout, ended
        assert server.process.wait(5) == 0
        assert_nothing_left(server, started, 1)
        assert other.complete(3).status_code == 200
        assert not list(folders.glob("session_2*"))


def _left(folder: Path) -> list[Path]:
    """Files and folders in it; Ray's marker of usage reports is not a session's."""
    return [path for path in folder.iterdir() if path.name.startswith(("aerie-", "session_"))]


def _signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)


def _answers(server: ServeProcess) -> bool:
    return server.complete(3, timeout_s=30).status_code == 200
