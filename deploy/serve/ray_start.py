"""Ray for `aerie serve`: joins a cluster, or starts a small one of this machine, with files that only their owner can
read (Ray 2.60 makes logs and sockets readable for all users), also without a writable home folder. Called by
`aerie.deploy.serve.launch`, and by `aerie.deploy.start` in the process of `ray start` (`hook`).

Ray 2.60's raylet starts two agents, Python processes that import for seconds, and waits 15 s for the files in which
they write their ports; then it aborts (ray-project/ray#65983), and Ray's start waits another 30 to 120 s for it. Here
the agents' ports are chosen before, so that the raylet waits for nothing, and the start watches the raylet and starts
it again if it ends.
"""

import contextlib
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from aerie.cluster.config import ConfigError
from aerie.cluster.linux import NO_HOME, home_folder
from aerie.deploy.processes import server_record
from aerie.workers.distributed.ports import free_ports

TRIES = 3  # attempts to start a raylet
START_LIMIT_S = 120.0  # to register with the GCS
_POLL_S = 0.05  # seconds between two looks
_PROCESSES = ("raylet", "log_monitor")  # those that `start_ray_processes` starts (Ray 2.60)
_PORTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
_TIMED_OUT = "Timed out waiting for file"  # a raylet's message if an agent does not report its port
_LINE = re.compile(r"\) [\w.]+:\d+: +(.*)")  # what a line of Ray's logs says, after time and place
_MAX_LOG_BYTES = 1 << 20  # bytes read from the end of a log


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
            if any(
                registered.hex() == node.node_id for registered in node.get_gcs_client().get_all_node_info(timeout=5)
            ):
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
    files = sorted(logs.glob(pattern), key=lambda path: path.stat().st_mtime)
    return files[-1].read_bytes()[-_MAX_LOG_BYTES:].decode(errors="replace") if files else ""


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _said(line: str) -> str:
    match = _LINE.search(line)
    return (match[1] if match else line)[:300]


# Processes of a small application: controller, two proxies, the task that builds the application, two ingresses, an
# engine's replica and its coordinator. Ray starts them in sequence, and each imports for seconds.
SERVING_PROCESSES = 8
SERVING_MODULES = (
    "ray.serve._private.controller",
    "ray.serve._private.proxy",
    "ray.serve._private.replica",
    "aerie.deploy.app",
)
CORES_TO_PREPARE = 8  # minimum cores to start processes before they are needed


# Limits of Ray 2.60 that are too short on a busy machine.
PATIENCE = {
    "RAY_raylet_start_wait_time_s": "120",  # until a raylet has registered; 30 s
    "RAY_gcs_server_port_wait_time_s": "120",  # until the GCS has a port; 30 s
    "RAY_agent_register_timeout_ms": "120000",  # until the agent of runtime environments has registered; 30 s
}
# Less work of an idle server's Ray (docs/measurements.md#an-idle-server). Its own metrics and records of tasks are for
# its dashboard, which is not there. Serve's controller asks the GCS three times in each loop, by default every 0.1 s; a
# replacement of a dead process begins at most 0.1 s later.
QUIET = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.2",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
    "RAY_debug_dump_period_milliseconds": "0",
}


def join_ray(address: str | None) -> None:
    """Join a cluster. address: None for RAY_ADDRESS."""
    import ray

    ray.init(address, namespace="serve")


def start_own_ray(object_store_mb: int, num_ranks: int, say: Callable[[str], None]) -> Any:
    """Run `start_ray` with files private to this user, which are removed when the server has ended. say: prints a
    line."""
    os.umask(stat.S_IRWXG | stat.S_IRWXO)
    folder = make_ray_folder(os.environ)
    server_record.note(session=str(folder / "session_"))  # a signal may come before Ray has made one
    node = start_ray(object_store_mb, num_ranks, say, folder)
    server_record.note(session=node.get_session_dir_path())
    return node


def start_ray(
    object_store_mb: int,
    num_ranks: int = 1,
    say: Callable[[str], None] = print,
    folder: Path | None = None,
) -> Any:
    """Start a minimal Ray on this machine: no dashboard, a small object store. With enough cores, the processes of
    Serve and of an engine with `num_ranks` start at once and import in parallel. A raylet that ends meanwhile is
    started again, and `say` prints why. Return Ray's record of its processes. folder: for Ray's sessions; None: Ray's
    default."""
    if (os.cpu_count() or 1) >= CORES_TO_PREPARE:
        os.environ.setdefault("RAY_prestart_worker_first_driver", "1")
        # Ray 2.60 starts as many as there are cores, and never more at once than this.
        os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(SERVING_PROCESSES + num_ranks))
        os.environ.setdefault("RAY_preload_python_modules", ",".join(SERVING_MODULES))
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name, value in (PATIENCE | QUIET).items():
        os.environ.setdefault(name, value)
    import ray

    watch_raylets(say)
    folder_option = {} if folder is None else {"_temp_dir": str(folder)}
    # "local": by default Ray would join a cluster that this host is a node of.
    ray.init(
        "local",
        namespace="serve",
        include_dashboard=False,
        object_store_memory=object_store_mb * 10**6,
        **folder_option,
    )
    return ray._private.worker._global_node


_MAX_SOCKET_BYTES = 103 if sys.platform == "darwin" else 107  # maximum bytes of a Unix socket's path
# What Ray (2.60) and `make_ray_folder` add to a folder for the path of a socket; a pid has up to seven digits.
_BELOW = "/ae-1a2b3c/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_MAX_ROOT_BYTES = _MAX_SOCKET_BYTES - len(_BELOW)


def ray_root(environment: Mapping[str, str]) -> Path:
    """Return the folder for Ray's files, as Ray chooses it: RAY_TMPDIR, else TMPDIR if its path is short enough, else
    /tmp. Raises ConfigError if RAY_TMPDIR is too long for sockets."""
    chosen = environment.get("RAY_TMPDIR", "")
    folder = Path(chosen or environment.get("TMPDIR") or "/tmp").absolute()
    if len(os.fsencode(folder)) <= _MAX_ROOT_BYTES:
        return folder
    if chosen:
        raise ConfigError(
            f"RAY_TMPDIR={chosen}: Ray's sockets would have paths of more than {_MAX_SOCKET_BYTES} bytes, the system's "
            f"limit; choose a folder whose path has at most {_MAX_ROOT_BYTES}"
        )
    return Path("/tmp")


def make_ray_folder(environment: Mapping[str, str]) -> Path:
    """Create a folder for Ray's sessions inside one that only this user can enter, and return it. Ray (2.60) opens its
    folder, sessions, sockets and logs to all users, again with its first worker: others could remove the raylet's
    socket, after which no actor starts. Removed with the session (`server_record.remove_session`). Raises ConfigError,
    OSError."""
    root = ray_root(environment)
    root.mkdir(parents=True, exist_ok=True)
    while True:
        private = root / f"ae-{secrets.token_hex(3)}"
        try:
            private.mkdir(mode=0o700)
            break
        except FileExistsError:
            continue
    (private / server_record.PRIVATE).touch(mode=0o600)
    folder = private / "r"
    folder.mkdir()
    return folder


MIN_FREE_BYTES = 32 * 10**6  # minimum free bytes to start


def check_room(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if Ray's temporary folder is full, since Ray's start would hang for two minutes, or if its path
    is too long."""
    folder = ray_root(environment)
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return  # Ray creates it
    if free < MIN_FREE_BYTES:
        raise ConfigError(
            f"{folder}: {free / 1e6:.1f} MB are free, and Ray's logs and sockets take {MIN_FREE_BYTES // 10**6} MB; "
            "free some space, or set RAY_TMPDIR to a folder that has it"
        )


_KERNELS = "TRITON_CACHE_DIR"


def do_without_home(environment: MutableMapping[str, str], folder: Path, say: Callable[[str], None]) -> None:
    """Change `environment` so that Ray and its workers on this machine need no home folder, if it is not writable.

    folder: private, removed with the server.
    say: prints a line."""
    kernels = Path(environment.get(_KERNELS) or home_folder(environment) / ".triton" / "cache")
    if home_folder(environment) == NO_HOME:  # Ray (2.60) and its workers look for one
        environment["HOME"] = str(folder)
    if not can_be_written(kernels):
        path = folder / _KERNELS.lower()
        path.mkdir()
        environment[_KERNELS] = str(path)
        say(f"{kernels}: cannot be written; the server uses {path}, which is gone with it; set HOME, or {_KERNELS}")


def can_be_written(path: Path) -> bool:
    """Return whether a file or folder at this path can be created or changed, judged by its nearest existing folder."""
    while not path.exists():
        if path == path.parent:
            return False
        path = path.parent
    return os.access(path, os.W_OK | os.X_OK) if path.is_dir() else path.is_file() and os.access(path, os.W_OK)
