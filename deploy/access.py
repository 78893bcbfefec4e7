"""Finds the Ray of a server or cluster node that runs on this machine, by its record (`aerie.deploy.processes`): its
address, and the token that permits running code on it. Imports no Ray before it is reached.

`~/.ray/auth_token` is the user's: it is read, and never written or changed. A server's own Ray has a token in the
server's private folder, a cluster of `aerie start` one in `~/.aerie`. With a token in `~/.ray`, Ray 2.60 would protect
every later `ray start` of the user, and refuse clients without RAY_AUTH_MODE.
"""

import argparse
import os
import shlex
import socket
import stat
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from aerie.cluster.config import ConfigError
from aerie.cluster.linux import home_folder
from aerie.deploy.processes.server_record import addresses_of, is_alive, note, processes, records

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


ADDRESS = "RAY_ADDRESS"
_CONNECT_LIMIT_S = 5.0  # maximum time to connect


def variables(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which Ray's and Serve's commands reach a Ray.

    address: HOST:PORT.
    environment: environment of its processes. A token in RAY_AUTH_TOKEN is not among the result."""
    values = {ADDRESS: address, MODE: "token" if uses_token(environment) else "disabled"}
    if uses_token(environment) and environment.get(TOKEN_PATH):
        values[TOKEN_PATH] = environment[TOKEN_PATH]
    return values


def note_ray() -> None:
    """Record how others reach the Ray that this process has joined or started."""
    import ray

    note(ray=variables(ray.get_runtime_context().gcs_address, os.environ | {MODE: os.environ.get(MODE, "disabled")}))


def find_ray(port: int | None = None, address: str | None = None) -> dict[str, str]:
    """Return the variables of the Ray at `address`, else of the only one on this machine that `aerie serve` or `aerie
    start` started or joined, else of RAY_ADDRESS.

    port: HTTP port of the server, or port of the cluster's head.
    Raises ConfigError if there is none, or if there are several."""
    if address is not None:
        return _at(address)
    reachable: dict[str, tuple[str, dict[str, str]]] = {}
    for folder, record, owner in records():
        if record.ray and port in (None, record.port) and is_alive(folder, record, owner):
            reach = dict(record.ray)
            if record.kind == "node":  # Ray may have replaced the given address: that of the loopback, a host's name
                reach |= {ADDRESS: next(iter(addresses_of(processes(folder))), reach[ADDRESS])}
            reachable.setdefault(reach[ADDRESS], (f"the {record.kind} of port {record.port}", reach))
    if len(reachable) > 1:
        several = " and ".join(name for name, _ in reachable.values())
        raise ConfigError(f"{several} run here; choose one with --port")
    for _, reach in reachable.values():
        return reach
    if port is None and (address := os.environ.get(ADDRESS)):
        return _at(address)
    where = "" if port is None else f" on port {port}"
    raise ConfigError(
        f"nothing that `aerie serve` or `aerie start` started runs here{where}; start it, or give --address HOST:PORT"
    )


def _at(address: str) -> dict[str, str]:
    environment = dict(os.environ)
    use_token(environment)
    return variables(address, environment | {MODE: environment.get(MODE, "disabled")})


def reach_ray(reach: Mapping[str, str]) -> None:
    """Connect this process to the Ray of `find_ray`, as a driver. Raises ConfigError."""
    host, _, port = reach[ADDRESS].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_LIMIT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{reach[ADDRESS]}: Ray does not answer there ({error})") from None
    os.environ.update(reach)
    import ray

    try:
        ray.init(reach[ADDRESS], namespace="serve", log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # OSError, ValueError, RuntimeError, Ray's own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{reach[ADDRESS]}: Ray refuses this command ({reason}); run it on a host of the cluster, with its token "
            f"({TOKEN_PATH})"
        ) from None


def run_env(arguments: argparse.Namespace) -> int:
    """Run `aerie env`: print the variables for a shell."""
    for name, value in find_ray(arguments.port, arguments.address).items():
        print(f"export {name}={shlex.quote(value)}")
    return 0
