"""`aerie stop`: ends the processes of `aerie serve` and `aerie start` on this machine, and no other Ray."""

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from aerie.cluster.transport import sockets
from aerie.deploy.processes.server_record import Record, clear, is_alive, processes, records

_POLL_S = 0.1  # seconds between two looks
_GUARD_LIMIT_S = 15.0  # maximum time of the guard's cleanup
_RAYLET_LIMIT_S = 10.0  # to leave the cluster


def run(arguments: argparse.Namespace) -> int:
    """Run `aerie stop`; see `stop`."""
    return stop(arguments.port, arguments.now)


def stop(port: int | None, now: bool) -> int:
    """Stop every server and node of this user, or those of `port`; return 0 once all their
    processes have ended. now: do not wait for running requests."""
    servers = [entry for entry in records() if port is None or entry[1].port == port]
    if not servers:
        where = "" if port is None else f" on port {port}"
        print(f"nothing that `aerie serve` or `aerie start` started runs here{where}")
    for folder, record, owner in sorted(servers, key=lambda entry: entry[1].kind == "node"):  # servers first
        if is_alive(folder, record, owner):
            (_stop_node if record.kind == "node" else _stop_server)(folder, record, owner, now)
        clear(folder)
        print(f"{_name(record)} has ended", flush=True)
    sockets.clear_abandoned([folder for folder, record, owner in records() if is_alive(folder, record, owner)])
    return 0


def _name(record: Record) -> str:
    return f"the {record.kind} of port {record.port}"


def _stop_server(folder: Path, record: Record, owner: dict[str, object], now: bool) -> None:
    """End a server, after its running requests unless `now`, and wait until its processes are gone."""
    pid = int(str(owner["pid"]))
    if not now:
        print(f"{_name(record)} (pid {pid}) ends once its running requests have", flush=True)
        _signal(pid, signal.SIGTERM)
        _wait(lambda: not sockets.is_alive(owner), record.stop_limit_s)
    if sockets.is_alive(owner):
        _signal(pid, signal.SIGKILL)
    _wait(lambda: not sockets.identity(record.guard)["started"] or not folder.exists(), _GUARD_LIMIT_S)


def _stop_node(folder: Path, record: Record, owner: dict[str, object], now: bool) -> None:
    """End the node; the raylet first, which tells the cluster that the node leaves."""
    pids = processes(folder)
    raylets = [pid for pid in pids if _program(pid) == "raylet"]
    if now or not raylets:
        return
    for pid in raylets:
        _signal(pid, signal.SIGTERM)
    _wait(lambda: not {*raylets} & {*processes(folder)}, _RAYLET_LIMIT_S)


def _program(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").partition("\0")[0]).name
    return ""


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait(reached: Callable[[], bool], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not reached() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
