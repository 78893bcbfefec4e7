"""`aerie status` and `aerie env`, without a Ray: which one is asked, what is printed, the exit status."""

import dataclasses
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from aerie.cluster.config import ConfigError
from aerie.deploy.access import find_ray
from aerie.deploy.cli import main
from aerie.deploy.processes.server_record import VARIABLE, Record, begin
from aerie.deploy.serve.applications import DeploymentStatus
from aerie.deploy.status import command
from aerie.deploy.status.report import (
    ApplicationStatus,
    EngineStatus,
    NodeStatus,
    Report,
    WaitingGroup,
)

READY = EngineStatus("ab12", "ready", "", 3, 1, 0.25, 2, 0)
ENGINE = DeploymentStatus("Engine", "HEALTHY", "", {"RUNNING": 1})
WELL = ApplicationStatus("aerie", "RUNNING", "", "/", [ENGINE], [READY])
REPORT = Report(
    "10.1.2.3:6379", [NodeStatus("10.1.2.3", True, "CPU 1", "CPU 2"), NodeStatus("10.1.2.4", False)], [WELL], []
)
WAITS = WaitingGroup("aerie", "Engine", "STRICT_PACK", ["GPU 1", "GPU 1"], "no node has GPU 2; the largest has GPU 1")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without servers and without a token."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in (VARIABLE, "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def _reach(address: str) -> dict[str, str]:
    return {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/tmp/it's here/auth_token"}


def test_the_only_server_is_found_and_one_of_several_by_its_port(place: Path) -> None:
    with pytest.raises(ConfigError, match="nothing that `aerie serve` or `aerie start` started runs here; .*--address"):
        find_ray()
    begin(Record("server", port=8000, ray=_reach("10.1.2.3:5000")))
    begin(Record("server", port=9999))  # Ray has not started there
    assert find_ray() == find_ray(8000) == _reach("10.1.2.3:5000")
    begin(Record("server", port=8001, ray=_reach("10.1.2.3:5000")))  # another application on the same Ray
    assert find_ray() == _reach("10.1.2.3:5000")
    begin(Record("node", port=6379, ray=_reach("10.1.2.3:6379")))
    with pytest.raises(ConfigError, match="the (server|node) of port .* run here; choose one with --port"):
        find_ray()
    assert find_ray(6379)["RAY_ADDRESS"] == "10.1.2.3:6379"
    with pytest.raises(ConfigError, match="runs here on port 7"):
        find_ray(7)


def test_another_ray_is_asked_with_the_users_token(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.9.9.9:1")
    assert find_ray() == {"RAY_ADDRESS": "10.9.9.9:1", "RAY_AUTH_MODE": "disabled"}
    token = place / "home" / ".aerie" / "auth_token"
    token.parent.mkdir(parents=True)
    token.write_text("0" * 64)
    assert find_ray(address="10.9.9.9:2") == {
        "RAY_ADDRESS": "10.9.9.9:2",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
    }
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert "secret" not in str(find_ray())


def test_env_is_for_a_shell(place: Path) -> None:
    begin(Record("server", port=8000, ray=_reach("10.1.2.3:5000")))
    program = f"{shlex.quote(sys.executable)} -m aerie.deploy.cli env"
    script = f'eval "$({program})"; env'
    found = subprocess.run(
        ["sh", "-c", script], env=os.environ | {"TMPDIR": str(place)}, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {f"{name}={value}" for name, value in _reach("10.1.2.3:5000").items()} <= {*found}


def test_a_ray_that_does_not_answer_is_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert main(["status", "--address", address]) == 2
        timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
        assert all(timer.finished.is_set() for timer in timers), "the process would end later"
    assert capsys.readouterr().err.startswith(f"{address}: Ray does not answer there (")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"applications": []}, 1),
        ({"waiting": [WAITS]}, 1),
        ({"applications": [dataclasses.replace(WELL, status="DEPLOYING")]}, 1),
        ({"applications": [dataclasses.replace(WELL, engines=[])]}, 1),
        ({"applications": [dataclasses.replace(WELL, engines=[], deployments=[])]}, 0),  # another team's
        (
            {
                "applications": [
                    dataclasses.replace(WELL, engines=[READY, EngineStatus("cd", "recovering", "x\nrank 1")])
                ]
            },
            1,
        ),
    ],
)
def test_exit_status_is_0_only_if_all_is_well(
    changes: dict[str, Any], code: int, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "reach_ray", lambda found: None)
    monkeypatch.setattr(command, "load", lambda name: lambda address, name: dataclasses.replace(REPORT, **changes))
    begin(Record("server", port=8000, ray=_reach("10.1.2.3:6379")))
    assert main(["status", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["is_well"] is (code == 0)
    assert main(["status"]) == code
    said = capsys.readouterr().out
    assert "Ray         10.1.2.3:6379, 1 node\n" in said and "10.1.2.4: is gone" in said
    if "waiting" in changes:
        assert "a replica of Engine of aerie, for GPU 1 + GPU 1 (STRICT_PACK): no node has GPU 2; the largest" in said
    if code == 0 and not changes:
        assert "engine ab12: ready; 3 running, 1 waiting, 25% of KV pages; 2 ranks, 0 restarts" in said
    if "recovering" in said:
        assert "0 restarts - rank 1" in said
