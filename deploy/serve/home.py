"""Replaces a home folder that is not writable by the server's own folder. Called by `deploy.serve.launch`."""

import os
from collections.abc import Callable, MutableMapping
from pathlib import Path

from cluster.linux import NO_HOME, home_folder
from deploy.serve.ray_files import token_path

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
    """Whether a file or folder at this path can be created or changed, by its nearest existing folder."""
    while not path.exists():
        if path == path.parent:
            return False
        path = path.parent
    return os.access(path, os.W_OK | os.X_OK) if path.is_dir() else path.is_file() and os.access(path, os.W_OK)
