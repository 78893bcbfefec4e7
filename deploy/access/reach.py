"""Finds the Ray of a server or cluster node that runs on this machine, by its record (`aerie.deploy.processes`):
address, and the token that it uses. Used by `aerie env`, `aerie status` and `aerie doctor --bundle`; imports no Ray
before it is reached."""

import argparse
import os
import shlex
import socket
from collections.abc import Mapping

from aerie.cluster.config import ConfigError
from aerie.deploy.access.ray_token import MODE, TOKEN_PATH, use_token, uses_token
from aerie.deploy.processes.server_record import addresses_of, is_alive, note, processes, records

ADDRESS = "RAY_ADDRESS"
_CONNECT_LIMIT_S = 5.0


def variables(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which Ray's and Serve's commands reach a Ray.

    address: HOST:PORT.
    environment: of its processes. A token in RAY_AUTH_TOKEN is not among the result."""
    found = {ADDRESS: address, MODE: "token" if uses_token(environment) else "disabled"}
    if uses_token(environment) and environment.get(TOKEN_PATH):
        found[TOKEN_PATH] = environment[TOKEN_PATH]
    return found


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
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for folder, record, owner in records():
        if record.ray and port in (None, record.port) and is_alive(folder, record, owner):
            reach = dict(record.ray)
            if record.kind == "node":  # Ray may have replaced the given address: that of the loopback, a host's name
                reach |= {ADDRESS: next(iter(addresses_of(processes(folder))), reach[ADDRESS])}
            found.setdefault(reach[ADDRESS], (f"the {record.kind} of port {record.port}", reach))
    if len(found) > 1:
        several = " and ".join(name for name, _ in found.values())
        raise ConfigError(f"{several} run here; choose one with --port")
    for _, reach in found.values():
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


def reach_ray(found: Mapping[str, str]) -> None:
    """Connect this process to the Ray of `find_ray`, as a driver. Raises ConfigError."""
    host, _, port = found[ADDRESS].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_LIMIT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{found[ADDRESS]}: Ray does not answer there ({error})") from None
    os.environ.update(found)
    import ray

    try:
        ray.init(found[ADDRESS], namespace="serve", log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # OSError, ValueError, RuntimeError, Ray's own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{found[ADDRESS]}: Ray refuses this command ({reason}); run it on a host of the cluster, with its token "
            f"({TOKEN_PATH})"
        ) from None


def run_env(arguments: argparse.Namespace) -> int:
    """`aerie env`: print the variables for a shell."""
    for name, value in find_ray(arguments.port, arguments.address).items():
        print(f"export {name}={shlex.quote(value)}")
    return 0
