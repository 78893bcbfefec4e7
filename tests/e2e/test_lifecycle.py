"""`aerie serve` shows nothing private to other users of its machine, and leaves nothing. `make test-faults` runs it."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.serve_process import ServeProcess, assert_nothing_left, body, serve_process, until
from tests.e2e.serving import free_port
from tests.support import MODELS, ROOT

pytestmark = [pytest.mark.ray, pytest.mark.slow]
# As the installed script does it.
AERIE = [sys.executable, "-P", "-c", "import sys; from aerie.command import main; sys.exit(main())"]
KEY = "sk-lifecycle-0123456789-secret"


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


@pytest.mark.parametrize("on_command_line", [False, True])
def test_no_file_and_no_process_shows_a_key_to_others(tmp_path: Path, folders: Path, on_command_line: bool) -> None:
    model = str(MODELS / "target")
    given = (model, "--api-key", KEY, "another-key-of-ours") if on_command_line else ("my.yaml",)
    keys = {"api_keys": [KEY, "another-key-of-ours"]}
    with serve_process(tmp_path, ray_folder=folders, arguments=given, ingress=keys) as server:
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, json=body(3), timeout=60).status_code == 401
        assert httpx.post(url, json=body(3), timeout=60, headers={"authorization": f"Bearer {KEY}"}).is_success
        assert _with_key(folders) == [], "not even files of this user's alone"
        readable = [path for path in folders.rglob("*") if path.is_file() and _others_can_read(path, folders)]
        assert readable == [], "logs, sockets, configurations"
        assert (tmp_path / "home" / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o644, "the user's own, unused"
        assert httpx.post(url, json=body(3), headers={"x-api-key": "another-key-of-ours"}, timeout=60).is_success
        for process in [psutil.Process(server.process.pid), *server.below()]:
            for name in ("cmdline", "environ"):
                assert KEY.encode() not in Path(f"/proc/{process.pid}/{name}").read_bytes(), process.cmdline()


def _aerie(*words: str) -> "subprocess.CompletedProcess[str]":
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "aerie.deploy.cli", *words]
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
        assert not list(folders.rglob("session_2*"))


def _left(folder: Path) -> list[Path]:
    """Files and folders in it; Ray's marker of usage reports is not a session's."""
    return [path for path in folder.iterdir() if path.name.startswith(("aerie-", "ae-", "session_"))]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=["TERM", "HUP", "INT"])
def test_a_signal_at_any_second_of_the_start_ends_it_and_leaves_nothing(
    tmp_path: Path, folders: Path, number: signal.Signals
) -> None:
    """As often as a ready server takes: AERIE_START_S in all, each time later."""
    variables = os.environ | {"RAY_TMPDIR": str(folders), "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    command = [*AERIE, "serve", "eagle", "--port", str(free_port())]
    for after_s in range(0, int(os.environ.get("AERIE_START_S", 24)), 3):
        log = tmp_path / f"{after_s}.log"
        with log.open("wb") as console:
            process = subprocess.Popen(command, env=variables, stdout=console, stderr=console, start_new_session=True)
        time.sleep(after_s + 0.5)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        sent_s = time.monotonic()
        code = process.wait(30)
        _, alive = psutil.wait_procs(started, timeout=5)
        print(f"{number.name} after {after_s + 0.5} s: status {code}, {time.monotonic() - sent_s:.1f} s later")
        assert not alive and _left(folders) == [], (after_s, alive, _left(folders))
        assert "Traceback" not in log.read_text(), log.read_text()
        ended = (0, 128 + number) if number == signal.SIGINT else (0, 128 + number, -number)  # before there is a guard
        assert code in ended, log.read_text()


def test_a_guard_killed_while_it_drains_leaves_the_streams_whole_and_nothing_else(
    tmp_path: Path, folders: Path
) -> None:
    """SIGTERM and, ten seconds later, SIGKILL to the process that was started, as `docker stop` sends them."""
    with serve_process(tmp_path, ray_folder=folders) as server:
        started = server.below()
        lines: list[str] = []
        reader = threading.Thread(target=_stream, args=(server, 1900, lines))
        reader.start()
        until(lambda: len(lines) > 2, 60)
        server.process.terminate()
        time.sleep(10)
        assert server.process.poll() is None, "it drains"
        server.process.kill()
        reader.join(90)
        assert lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2]
        assert_nothing_left(server, started, 20)
        until(lambda: _left(folders) == [], 10, lambda: str(_left(folders)))


def _stream(server: ServeProcess, max_tokens: int, lines: list[str]) -> None:
    asked = body(max_tokens) | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=120) as stream:
        for line in stream.iter_lines():
            if line:
                lines.append(line)


def test_a_full_temporary_folder_is_told_in_a_line_or_does_no_harm(tmp_path: Path) -> None:
    """A file system of its own, of which so many KB are left; needs root."""
    for left_kb in (0, 64):
        script = (
            "mount -t tmpfs -o size=40m none /tmp && chmod 1777 /tmp && "
            f"dd if=/dev/zero of=/tmp/filler bs=1K count={40 * 1024 - left_kb} 2>/dev/null; "
            f"exec timeout -s TERM 60 {sys.executable} -m aerie.deploy.cli serve eagle --port {free_port()}"
        )
        command = ["unshare", "--mount", "--", "sh", "-c", script]
        variables = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": "/tmp", "RAY_AUTH_MODE": "disabled"}
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=150, cwd="/")
        if "Operation not permitted" in ended.stderr:
            pytest.skip("needs to be root, with namespaces")
        print(left_kb, ended.returncode, ended.stdout[-600:], ended.stderr[-600:])
        assert "Traceback" not in ended.stdout + ended.stderr
        if ended.returncode not in (0, 128 + signal.SIGTERM):  # else it ran until it was told to end
            last = ended.stderr.strip().splitlines()[-1]
            assert "/tmp" in last or "space" in last, ended.stderr


# A user whom the system does not know, as in a container that runs under any user's number.
NO_USER = """
import pwd

def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")

pwd.getpwuid = getpwuid
"""


@pytest.mark.parametrize("home", ["none", "read-only"])
def test_a_server_without_a_home_that_can_be_written_answers_and_says_so_in_a_line(
    tmp_path: Path, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read-only: a file system of its own; needs root. `pytest -s -m slow tests/e2e/test_lifecycle.py -k home`"""
    mine, hook = tmp_path / "home", tmp_path / "hook"
    for folder in (mine, hook):
        folder.mkdir()
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    before = ("env", "-u", "RAY_AUTH_MODE", "-u", "RAY_AUTH_TOKEN_PATH", "-u", "RAY_AUTH_TOKEN")
    if home == "none":
        (hook / "sitecustomize.py").write_text(NO_USER)
        before = (*before, "-u", "HOME", "-u", "USER", f"PYTHONPATH={ROOT}:{hook}")
    else:
        mount = f'mount -t tmpfs -o ro none {mine} && exec "$@"'
        before = (*before, f"HOME={mine}", "unshare", "--mount", "--", "sh", "-c", mount, "sh")
        probe = subprocess.run([*before, "true"], capture_output=True, text=True, timeout=30)
        if probe.returncode:
            pytest.skip(f"needs to be root, with namespaces: {probe.stderr}")
    with serve_process(tmp_path, before=before) as server:
        assert server.complete(3).status_code == 200
        server.process.terminate()
        assert server.process.wait(60) == 0
    console = server.log.read_text()
    told = [line for line in console.splitlines() if "cannot be written" in line]
    print(told)
    assert len(told) == 1 and "set HOME" in told[0], console
    assert "Traceback" not in console, console


def test_stop_ends_a_node_and_no_other_ray_of_the_host(tmp_path: Path, folders: Path) -> None:
    """Two heads with folders of their own: one is stopped by its port."""
    ports, before = (free_port(), free_port()), set(psutil.pids())
    variables = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    try:
        for number, port in enumerate(ports):
            command = [
                sys.executable,
                "-m",
                "aerie.deploy.cli",
                "start",
                "--head",
                f"--port={port}",
                "--node-ip=127.0.0.1",
            ]
            place = folders / f"ray{number}"
            place.mkdir()
            subprocess.run(command, env=variables | {"RAY_TMPDIR": str(place)}, check=True, timeout=120)
        assert _aerie("stop", "--port", str(ports[0])).stdout.endswith(f"the node of port {ports[0]} has ended\n")
        lines = [_command(pid) for pid in psutil.pids() if pid not in before]
        assert not any(str(folders / "ray0") in line for line in lines), lines
        assert any(str(folders / "ray1") in line for line in lines), "the other one runs"
        assert not list((folders / "ray0").rglob("session_2*")) and list((folders / "ray1").rglob("session_2*"))
    finally:
        assert _aerie("stop", "--port", str(ports[1])).returncode == 0
    assert not any(str(folders) in _command(pid) for pid in psutil.pids() if pid not in before)


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""
