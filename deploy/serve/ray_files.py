"""Keeps Ray's files private to their owner. Ray 2.60 makes logs, sockets and the token, which permits running code,
readable for all users of a machine. Called by `deploy.serve.launch` and `deploy.start` before Ray starts.
"""

import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from cluster.config import ConfigError
from cluster.linux import home_folder

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
        return  # Ray makes it
    if free < MIN_FREE_BYTES:
        raise ConfigError(
            f"{folder}: {free / 1e6:.1f} MB are free, and Ray's logs and sockets take {MIN_FREE_BYTES // 10**6} MB; "
            "free some space, or set RAY_TMPDIR to a folder that has it"
        )


def token_path(environment: Mapping[str, str]) -> Path:
    """Return the path where Ray looks for the token."""
    return Path(environment.get("RAY_AUTH_TOKEN_PATH") or home_folder(environment) / ".ray" / "auth_token")
