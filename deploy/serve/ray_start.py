"""Ray for `aerie serve`: joins a cluster, or starts a small one of this machine, with files that only their owner can
read, also without a writable home folder. Ray 2.60 makes logs, sockets and the token (which permits running code)
readable for all users of a machine. Called by `aerie.deploy.serve.launch`; by `aerie.deploy.start` for files and
token."""

import os
import shutil
import stat
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from aerie.cluster.config import ConfigError
from aerie.cluster.linux import NO_HOME, home_folder
from aerie.deploy.processes import server_record

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


def join_ray(address: str | None) -> None:
    """Join a cluster. address: None for RAY_ADDRESS."""
    import ray

    ray.init(address, namespace="serve")


def start_own_ray(object_store_mb: int, num_ranks: int) -> Any:
    """Run `start_ray` with files private to this user, which are removed when the server has ended."""
    keep_to_owner(os.environ)
    node = start_ray(object_store_mb, num_ranks)
    session = node.get_session_dir_path()
    os.chmod(session, 0o700)  # Ray opens it to all users
    server_record.note(session=session)
    return node


def start_ray(object_store_mb: int, num_ranks: int = 1) -> Any:
    """Start a minimal Ray on this machine: no dashboard, a small object store. With enough cores, the processes of
    Serve and of an engine with `num_ranks` start at once and import in parallel. Return Ray's record of its
    processes."""
    if (os.cpu_count() or 1) >= CORES_TO_PREPARE:
        os.environ.setdefault("RAY_prestart_worker_first_driver", "1")
        # Ray 2.60 starts as many as there are cores, and never more at once than this.
        os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(SERVING_PROCESSES + num_ranks))
        os.environ.setdefault("RAY_preload_python_modules", ",".join(SERVING_MODULES))
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # the default of 30 s is too short on a busy machine
    import ray

    # "local": by default Ray would join a cluster that this host is a node of.
    ray.init("local", namespace="serve", include_dashboard=False, object_store_memory=object_store_mb * 10**6)
    return ray._private.worker._global_node


MIN_FREE_BYTES = 32 * 10**6
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def keep_to_owner(environment: Mapping[str, str]) -> None:
    """Make the existing token, and files that this process and its children create from now on, private to this user.
    environment: names the token's path for Ray."""
    os.umask(_OTHERS)
    path = token_path(environment)
    try:
        found = path.stat()
        if found.st_uid == os.getuid() and found.st_mode & _OTHERS:
            path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
    except OSError:
        pass  # there is none, or Ray reports why it cannot be read


def use_token() -> None:
    """Use the token of `aerie start`, if there is one, before this process joins a cluster. Ray 2.60 reads a stored
    token by itself only for clusters that it starts."""
    if os.environ.get("RAY_AUTH_TOKEN") or token_path(os.environ).exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def check_room(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if Ray's temporary folder is full: Ray's start would hang for two minutes."""
    folder = environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp"
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return  # Ray creates it
    if free < MIN_FREE_BYTES:
        raise ConfigError(
            f"{folder}: {free / 1e6:.1f} MB are free, and Ray's logs and sockets take {MIN_FREE_BYTES // 10**6} MB; "
            "free some space, or set RAY_TMPDIR to a folder that has it"
        )


def token_path(environment: Mapping[str, str]) -> Path:
    """Return the path where Ray looks for the token."""
    return Path(environment.get("RAY_AUTH_TOKEN_PATH") or home_folder(environment) / ".ray" / "auth_token")


_KERNELS = "TRITON_CACHE_DIR"


def do_without_home(environment: MutableMapping[str, str], folder: Path, say: Callable[[str], None]) -> None:
    """Change `environment` so that Ray and its workers on this machine need no home folder, if it is not writable.

    folder: private, removed with the server.
    say: prints a line."""
    token = token_path(environment)
    wanted = {
        "RAY_AUTH_TOKEN_PATH": token,
        _KERNELS: Path(environment.get(_KERNELS) or home_folder(environment) / ".triton" / "cache"),
    }
    missing = {name: path for name, path in wanted.items() if not can_be_written(path)}
    if token.exists() or environment.get("RAY_AUTH_TOKEN"):
        missing.pop("RAY_AUTH_TOKEN_PATH", None)
    for name in missing:
        path = folder / name.lower()
        if name == _KERNELS:
            path.mkdir()
        else:
            path.touch(mode=0o600)
            path.write_text(os.urandom(32).hex())
        environment[name] = str(path)
    if home_folder(environment) == NO_HOME:  # Ray (2.60) and its workers look for one
        environment["HOME"] = str(folder)
    if missing:
        unwritable = ", ".join(str(path) for path in missing.values())
        say(
            f"{unwritable}: cannot be written; the server uses {folder}, which is gone with it; set HOME, or "
            f"{' and '.join(missing)}"
        )


def can_be_written(path: Path) -> bool:
    """Return whether a file or folder at this path can be created or changed, judged by its nearest existing folder."""
    while not path.exists():
        if path == path.parent:
            return False
        path = path.parent
    return os.access(path, os.W_OK | os.X_OK) if path.is_dir() else path.is_file() and os.access(path, os.W_OK)
