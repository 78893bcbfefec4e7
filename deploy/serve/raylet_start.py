"""Starts a node's raylet so that a busy machine does not end it, and starts it again if it ends. Used by
`aerie.deploy.serve.ray_start` in its own process, and by `aerie.deploy.start` in the process of `ray start` (`hook`).

Ray 2.60's raylet starts two agents, Python processes that import for seconds, and waits 15 s for the files in which
they write their ports; then it aborts (ray-project/ray#65983), and Ray's start waits another 30 to 120 s for it. Here
the agents' ports are chosen before, so that the raylet waits for nothing, and the start watches the raylet.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aerie.workers.distributed.ports import free_ports

TRIES = 3
START_LIMIT_S = 120.0  # to register with the GCS
_POLL_S = 0.05
_PROCESSES = ("raylet", "log_monitor")  # those that `start_ray_processes` starts (Ray 2.60)
_PORTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
_TIMED_OUT = "Timed out waiting for file"  # of the raylet, for an agent's port
_LINE = re.compile(r"\) [\w.]+:\d+: +(.*)")  # what a line of Ray's logs says, after time and place
_MAX_LOG_BYTES = 1 << 20


class RayletEndedError(RuntimeError):
    """The raylet could not be started; the message says why."""


def hook(ray_params: Any, head: bool) -> None:
    """RAY_START_HOOK of `ray start`: watch the raylet of this process's node."""
    watch_raylets(lambda line: print(line, flush=True))


def watch_raylets(say: Callable[[str], None]) -> None:
    """Make the nodes that this process starts start their raylet with `start_raylet`. say: prints a line."""
    from ray._private.node import Node

    start = Node.start_ray_processes
    if not hasattr(start, "is_watched"):

        def watched(node: Any) -> None:
            start_raylet(node, lambda: start(node), say)

        watched.is_watched = True  # type: ignore[attr-defined]
        Node.start_ray_processes = watched


def start_raylet(node: Any, start: Callable[[], None], say: Callable[[str], None]) -> None:
    """Start the raylet of a node, at most `TRIES` times, until it has registered with the GCS.

    node: Ray's record of its processes.
    start: starts raylet and log monitor.
    Raises RayletEndedError."""
    open_ports = [name for name in _PORTS if not getattr(node._ray_params, name)]  # others are the user's choice
    for number in range(1, TRIES + 1):
        _give_ports(node, open_ports)
        start()
        reason = _wait_until_registered(node)
        if not reason:
            return
        if number == TRIES:
            raise RayletEndedError(f"Ray's raylet ended {TRIES} times while it started; the last time, {reason}")
        say(f"Ray's raylet ended while it started ({reason}); starting it again, {number + 1} of {TRIES}")
        _clear(node)


def _give_ports(node: Any, names: Sequence[str]) -> None:
    """Choose the agents' ports, and write the one that the raylet does not get as an argument where it looks for it."""
    from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined]

    for name, port in zip(names, free_ports(len(names), ""), strict=True):
        setattr(node._ray_params, name, port)
    port = node._ray_params.dashboard_agent_listen_port
    persist_port(node.get_session_dir_path(), node.node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, port)


def _wait_until_registered(node: Any) -> str:
    """Return "" once the raylet has registered, or why it ended. Raises RayletEndedError if it does neither."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        for name, process in node.dead_processes():
            if name in ("raylet", "gcs_server"):
                return cause(Path(node.get_logs_dir_path()), name, process.returncode)
        with contextlib.suppress(Exception):  # the GCS is not there yet, or has died
            if any(found.hex() == node.node_id for found in node.get_gcs_client().get_all_node_info(timeout=5)):
                return ""
        time.sleep(_POLL_S)
    raise RayletEndedError(f"Ray's raylet had not registered after {START_LIMIT_S:g} s: the machine is too busy")


def _clear(node: Any) -> None:
    """End what is left of a try, and remove the sockets of its raylet."""
    for name in _PROCESSES:
        if name in node.all_processes:
            node._kill_process_type(name, check_alive=False, wait=True)
    for name in (node.raylet_socket_name, node.plasma_store_socket_name):
        with contextlib.suppress(OSError):
            os.unlink(name)


def cause(logs: Path, name: str, status: int | None) -> str:
    """Return why one of Ray's processes ended, from its newest log.

    name: "raylet" or "gcs_server".
    status: exit status, negative for a signal."""
    text = "".join(_newest(logs, f"{name}*.{kind}") for kind in ("out", "err"))
    if _TIMED_OUT in text:
        return "its agents had not started within Ray's limit of 15 s: the machine is busy"
    if "fate shares with the agent" in text or "agent failed" in text.lower():
        agent = _last_line(_newest(logs, "dashboard_agent*.err") or _newest(logs, "dashboard_agent*.log"))
        return f"its agent ended: {agent or 'it does not say why'}; see {logs}"
    fatal = [line for line in text.splitlines() if re.match(r"\[.* [CF] \d+ ", line)]
    if fatal:
        return _said(fatal[-1])
    if status is not None and status < 0:
        return f"it was killed by signal {-status}: `dmesg` names the OOM killer, if it was that"
    return f"exit status {status}; see {logs}"


def _newest(logs: Path, pattern: str) -> str:
    found = sorted(logs.glob(pattern), key=lambda path: path.stat().st_mtime)
    return found[-1].read_bytes()[-_MAX_LOG_BYTES:].decode(errors="replace") if found else ""


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _said(line: str) -> str:
    match = _LINE.search(line)
    return (match[1] if match else line)[:300]
