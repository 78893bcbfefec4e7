"""Processes below the server that are stopped or have ended unseen."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from aerie.cluster import linux
from aerie.deploy.processes.server_record import VARIABLE, Record, begin, processes
from aerie.deploy.serve import watches
from aerie.deploy.serve.watches import ProcessWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
# A parent and its child: the child's number is printed, and outlives the parent.
FAMILY = (
    "import subprocess, time; print(subprocess.Popen(['sleep', '120'], stdout=-3).pid, flush=True); time.sleep(120)"
)


def test_a_stopped_process_is_ended_and_an_orphan_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "STOPPED_LIMIT_S", 1.0)
    monkeypatch.setattr(watches, "_ZOMBIE_LIMIT_S", 0.4)
    monkeypatch.setattr(ProcessWatch, "period_s", 0.05)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "")
    linux.adopt_orphans()
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    folder = begin(Record("server"))  # after them: their environment does not name it
    said: list[str] = []
    watch = ProcessWatch(said.append)
    watch.start()
    try:
        _until(lambda: set(processes(folder)) >= {parent.pid, child.pid})
        child.suspend()
        time.sleep(0.1)
        child.resume()
        time.sleep(1.2)
        assert child.is_running() and not said, "for a moment only"
        os.kill(parent.pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        assert parent.wait(30) == -signal.SIGKILL
        assert time.monotonic() - stopped_s >= 0.9
        assert len(said) == 1 and said[0].endswith(f" (pid {parent.pid}) had been stopped for 1 s and was ended")
        child.kill()
        _until(lambda: not psutil.pid_exists(child.pid))
        _until(lambda: not {parent.pid, child.pid} & set(processes(folder)))
    finally:
        watch.stop()
        linux._prctl(linux._PR_SET_CHILD_SUBREAPER, 0)
        parent.kill()
        parent.communicate()


def _until(reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
