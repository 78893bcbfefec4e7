"""A raylet that ends while it starts is started again, with the cause named; slow agents do not end it."""

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aerie.deploy.serve import ray_start
from aerie.deploy.serve.ray_start import RayletEndedError, cause
from tests.support import ROOT

# A line each of raylets of Ray 2.60 that ended.
AGENTS_SLOW = (
    "[2026-11-28 21:00:33,476 C 4349 4349] (raylet) node_manager.cc:3588:  An unexpected system state has occurred. "
    "Check failed: statussetor3588.has_value() Timed out waiting for file /tmp/x/metrics_agent_port_e7d6\n*** Stack ***"
)
AGENT_GONE = (
    "[2026-11-28 21:00:33,476 E 1 2] (raylet) agent_manager.cc:86: The raylet exited immediately because one Ray agent "
    "failed, agent_name = dashboard_agent.\nThe raylet fate shares with the agent."
)
NO_DISK = "[2026-11-28 21:00:33,476 C 1 1] (raylet) dlmalloc.cc:192: Check failed: fd >= 0 No space left on device"


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (AGENTS_SLOW, 1, "its agents had not started within Ray's limit of 15 s: the machine is busy"),
        (AGENT_GONE, 1, "its agent ended: OSError: [Errno 98] address already in use; see "),
        (NO_DISK, -6, "Check failed: fd >= 0 No space left on device"),
        ("[2026 I 1 1] (raylet) main.cc:1: hello", -9, "it was killed by signal 9: `dmesg` names the OOM killer"),
        ("", 3, "exit status 3; see "),
    ],
)
def test_the_cause_is_in_the_logs(text: str, status: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "raylet.out").write_text("an earlier try")
    os.utime(tmp_path / "raylet.out", (1, 1))
    (tmp_path / "raylet.1.out").write_text(text)
    (tmp_path / "dashboard_agent.err").write_text("Traceback\nOSError: [Errno 98] address already in use\n")
    assert cause(tmp_path, "raylet", status).startswith(said)


class Node:
    """Ray's record of a node whose raylet ends `num_ends` times."""

    def __init__(self, folder: Path, num_ends: int) -> None:
        self.node_id, self._folder, self._left = "ab", folder, num_ends
        ports = ("metrics_agent_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
        self._ray_params = SimpleNamespace(metrics_export_port=8080, **dict.fromkeys(ports, 0))
        self.raylet_socket_name = self.plasma_store_socket_name = str(folder / "raylet")
        self.all_processes: dict[str, Any] = {}
        self.ports: list[int] = []

    def start(self) -> None:
        assert not self.all_processes and not (self._folder / "raylet").exists()
        (self._folder / "raylet").touch()
        self.all_processes = {"raylet": 1, "log_monitor": 1}
        port = self._ray_params.dashboard_agent_listen_port
        assert (self._folder / "dashboard_agent_listen_port_ab").read_text() == str(port)
        assert port and self._ray_params.metrics_export_port == 8080, "the user's choice"
        self.ports.append(port)
        self._left -= 1

    def dead_processes(self) -> list[tuple[str, Any]]:
        return [("log_monitor", SimpleNamespace(returncode=0))] + [
            ("raylet", SimpleNamespace(returncode=-9)) for _ in range(self._left >= 0)
        ]

    def get_session_dir_path(self) -> str:
        return str(self._folder)

    get_logs_dir_path = get_session_dir_path

    def get_gcs_client(self) -> Any:
        return SimpleNamespace(get_all_node_info=lambda timeout: [bytes.fromhex("ab")])

    def _kill_process_type(self, name: str, check_alive: bool, wait: bool) -> None:
        del self.all_processes[name]


def _persist(folder: str, node_id: str, name: str, port: int) -> None:
    Path(folder, f"{name}_{node_id}").write_text(str(port))


@pytest.mark.parametrize("num_ends", [0, 1, 2, 3])
def test_it_is_started_three_times_at_most(num_ends: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._raylet.persist_port", _persist)
    node, said = Node(tmp_path, num_ends), list[str]()
    if num_ends == ray_start.TRIES:
        with pytest.raises(RayletEndedError, match="ended 3 times while it started; the last time, it was killed"):
            ray_start.start_raylet(node, node.start, said.append)
    else:
        ray_start.start_raylet(node, node.start, said.append)
        assert set(node.all_processes) == {"raylet", "log_monitor"}
    assert len(node.ports) == min(num_ends + 1, 3) and len(said) == min(num_ends, 2)
    for number, line in enumerate(said):
        assert "killed by signal 9" in line and line.endswith(f"starting it again, {number + 2} of 3")


def test_a_raylet_that_never_registers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._raylet.persist_port", _persist)
    monkeypatch.setattr(ray_start, "START_LIMIT_S", 0.1)
    node = Node(tmp_path, -1)
    node.node_id = "cd"
    monkeypatch.setattr(node, "start", lambda: None)
    with pytest.raises(RayletEndedError, match="had not registered after 0.1 s: the machine is too busy"):
        ray_start.start_raylet(node, node.start, lambda line: None)


# Kills the first raylet, and stops both agents of the second one for longer than Ray's raylet waits for them.
DISTURBED = """
import os, signal, sys, threading, time
import psutil, ray
from aerie.deploy.serve.ray_start import start_ray

killed, stopped = [], []
AGENTS = ("dashboard/agent.py", "agent/main.py")

def disturb():
    while len(stopped) < 2:
        for process in psutil.Process().children(recursive=True):
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if not words:
                continue
            if words[0].endswith("/raylet") and not killed:
                killed.append(process.pid)
                process.kill()
            agent = "python" in words[0] and words[1:] and any(word.endswith(AGENTS) for word in words[:6])
            if agent and killed and process.ppid() not in killed and process.pid not in stopped:
                stopped.append(process.pid)
                process.suspend()
        time.sleep(0.005)

thread = threading.Thread(target=disturb, daemon=True)
thread.start()
node = start_ray(100, say=lambda line: print(line, flush=True))
thread.join(30)
print("registered with", len(stopped), "stopped agents", flush=True)
time.sleep(float(sys.argv[1]))
assert not [name for name, _ in node.dead_processes()], node.dead_processes()
for pid in stopped:
    os.kill(pid, signal.SIGCONT)
assert ray.get(ray.remote(num_cpus=0)(lambda: 7).remote(), timeout=60) == 7
print("works", flush=True)
ray.shutdown()
"""


@pytest.mark.ray
@pytest.mark.parametrize("stopped_s", [1.0, pytest.param(20.0, marks=pytest.mark.slow)])
def test_ray_works_after_a_killed_raylet_and_with_agents_slower_than_its_limit(stopped_s: float) -> None:
    folder = tempfile.mkdtemp(prefix="rs", dir="/tmp")
    variables = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(DISTURBED), str(stopped_s)],
            env=variables,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "killed by signal 9" in done.stdout and "starting it again, 2 of 3" in done.stdout
        assert "registered with 2 stopped agents" in done.stdout and "works" in done.stdout, done.stdout
    finally:
        shutil.rmtree(folder, ignore_errors=True)
