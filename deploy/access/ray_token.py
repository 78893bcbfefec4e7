"""Ray's token, which permits running code on a cluster: where it is, and who makes one. Used by
`aerie.deploy.serve.launch` and `aerie.deploy.start`.

`~/.ray/auth_token` is the user's: it is read, and never written or changed. A server's own Ray has a token in the
server's private folder, a cluster of `aerie start` one in `~/.aerie`. With a token in `~/.ray`, Ray 2.60 would protect
every later `ray start` of the user, and refuse clients without RAY_AUTH_MODE.
"""

import os
import stat
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from aerie.cluster.config import ConfigError
from aerie.cluster.linux import home_folder

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def uses_token(environment: Mapping[str, str]) -> bool:
    """Whether Ray's processes with these variables use a token; they do unless RAY_AUTH_MODE says otherwise."""
    return environment.get(MODE, "token").lower() == "token"


def token_path(environment: Mapping[str, str]) -> Path:
    """Return the path of a cluster's token: the user's choice, else the user's own token if there is one, else
    Aerie's."""
    if chosen := environment.get(TOKEN_PATH):
        return Path(chosen)
    own = home_folder(environment) / ".ray" / "auth_token"
    return own if own.exists() else home_folder(environment) / ".aerie" / "auth_token"


def make_own_token(environment: MutableMapping[str, str], folder: Path) -> None:
    """Create a token for a server's own Ray in its private folder, and set the variables that name it, unless the user
    chose a token or RAY_AUTH_MODE=disabled."""
    environment.setdefault(MODE, "token")
    if not uses_token(environment) or environment.get(TOKEN) or environment.get(TOKEN_PATH):
        return
    path = folder / "auth_token"
    _write(path)
    environment[TOKEN_PATH] = str(path)


def use_token(environment: MutableMapping[str, str]) -> None:
    """Use the token of `aerie start`, if there is one, before this process joins a cluster. Ray 2.60 reads a token by
    itself only for clusters that it starts."""
    if environment.get(TOKEN):
        environment.setdefault(MODE, "token")
    elif (path := token_path(environment)).exists():
        environment.setdefault(MODE, "token")
        environment.setdefault(TOKEN_PATH, str(path))


def ensure_token(environment: MutableMapping[str, str], is_head: bool) -> str:
    """Set RAY_AUTH_TOKEN_PATH for a node of a cluster; on a head, create the token if it is missing. Return a warning,
    "" for none. Raises ConfigError on a joining host without a token."""
    if not uses_token(environment) or environment.get(TOKEN):
        return ""
    path = token_path(environment)
    environment[TOKEN_PATH] = str(path)
    if path.exists():
        readable = path.stat().st_mode & _OTHERS
        return (
            f"{path}: other users of this machine can read it and so run code; `chmod 600 {path}`" if readable else ""
        )
    if not is_head:
        raise ConfigError(
            f"{TOKEN} is not set and {path} does not exist: a host joins with the head's token; copy the file "
            f"from there (`aerie start --head` names it), or set {MODE}=disabled on all hosts of a private network"
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: the cluster's token cannot be written there ({error.strerror}); set HOME, or {TOKEN_PATH} "
            "to a file that can be, on all hosts"
        ) from None
    return ""


def _write(path: Path) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(os.urandom(32).hex())
