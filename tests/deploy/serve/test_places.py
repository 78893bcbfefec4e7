"""Places that cannot be written and memory that does not suffice: one line with the remedy, and no traceback."""

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from aerie.cluster.config import ConfigError
from aerie.deploy import cli
from aerie.deploy.access import ensure_token
from aerie.deploy.serve import launch
from aerie.deploy.serve.console import log_path
from aerie.deploy.serve.ray_start import can_be_written, do_without_home
from aerie.workers.distributed.ports import free_port
from tests.support import ROOT

NOWHERE = "/dev/null/home"  # cannot be made by root either


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/tmp/x"),
            "aerie: /tmp/x: No space left on device: free some",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "aerie: TMPDIR, HOME or the output: No space left"),
        (OSError(errno.EROFS, "Read-only file system", "/home/x"), "aerie: /home/x: Read-only file system: "),
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), "aerie: /root/x: Permission denied: "),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "No usable temporary"),
        (OSError(errno.EMFILE, "Too many open files", "/x"), "aerie: /x: Too many open files: .*ulimit -n"),
        (MemoryError(), "aerie: not enough memory: free memory, or raise the limit"),
        (KeyboardInterrupt(), "aerie: interrupted"),
    ],
)
def test_a_command_that_fails_for_its_surroundings_says_so_in_one_line(
    error: BaseException, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> str:
        raise error

    monkeypatch.setattr("aerie.deploy.config.files.starting_point", fail)
    assert cli.main(["config"]) == (130 if isinstance(error, KeyboardInterrupt) else 2)
    (said,) = capsys.readouterr().err.splitlines()
    assert re.search(line, said), said


def test_a_reader_that_leaves_is_no_error() -> None:
    program = "import sys; from aerie.deploy.cli import main; sys.exit(main(['config', 'eagle']))"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(30) == 128 + signal.SIGPIPE


def test_other_errors_of_the_system_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise FileNotFoundError(errno.ENOENT, "No such file", "ours")

    monkeypatch.setattr("aerie.deploy.config.files.starting_point", fail)
    with pytest.raises(FileNotFoundError):
        cli.main(["config"])


def test_a_server_without_a_home_keeps_kernels_in_its_own_folder(tmp_path: Path) -> None:
    environment = {"TRITON_CACHE_DIR": f"{NOWHERE}/.triton"}
    said: list[str] = []
    do_without_home(environment, tmp_path, said.append)
    kernels = Path(environment["TRITON_CACHE_DIR"])
    assert kernels.parent == tmp_path and kernels.is_dir()
    (line,) = said
    assert line.startswith(f"{NOWHERE}/.triton: cannot be written") and "set HOME" in line


def test_a_user_whom_the_system_does_not_know_gets_the_servers_folder_as_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no HOME: a container that runs under any user's number."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    environment, said = dict[str, str](), list[str]()
    do_without_home(environment, tmp_path, said.append)
    assert environment["HOME"] == str(tmp_path)
    assert Path(environment["TRITON_CACHE_DIR"]).parent == tmp_path
    (line,) = said
    assert line.startswith("/dev/null/home/.triton/cache") and "set HOME" in line
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert log_path("serve-1").parent.parent == tmp_path and not (tmp_path / "~").exists()


def test_a_home_that_can_be_written_is_left_alone(tmp_path: Path) -> None:
    environment = {"TRITON_CACHE_DIR": f"{tmp_path}/kernels"}
    before, said = dict(environment), list[str]()
    do_without_home(environment, tmp_path, said.append)
    assert environment == before and not said and not list(tmp_path.iterdir())
    assert can_be_written(tmp_path / "x" / "y") and not can_be_written(Path(NOWHERE) / "x")


def test_a_head_that_cannot_write_its_token_names_the_variable() -> None:
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{NOWHERE}/token"}
    with pytest.raises(ConfigError, match=f"^{NOWHERE}/token: .*cannot be written .*set HOME, or RAY_AUTH_TOKEN_PATH"):
        ensure_token(environment, is_head=True)


@pytest.mark.parametrize(
    ("joins", "remedy"),
    [(False, "cannot be started .*ulimit -v.*; more in log"), (True, "cannot be joined .*--address")],
)
def test_a_ray_that_does_not_start_is_one_line_and_its_traceback_is_logged(
    joins: bool, remedy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=rf"^Ray {remedy}") as raised, launch._explained(joins, Path("log")):
        raise RuntimeError("the raylet\ndied")
    assert "(RuntimeError: the raylet)" in str(raised.value)
    assert "Traceback" in capfd.readouterr().err


def test_a_folder_for_temporary_files_that_is_full_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", NOWHERE)
    monkeypatch.setenv("XDG_STATE_HOME", NOWHERE)
    assert not os.access(NOWHERE, os.W_OK)
    assert cli.main(["plan", "eagle", "--nodes", "0"]) == 0, "it needs none"
    assert cli.main(["serve", "eagle", "--port", str(free_port())]) == 2
