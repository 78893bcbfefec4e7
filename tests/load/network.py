"""Nodes as network namespaces on one bridge, each with one link. This process is the clients' end: its own namespace
has a link to the bridge too. Works inside `tests.load.sandbox` only.

node i     namespace n<i>, address 10.77.0.<i>, interface eth0
clients    this namespace, address 10.77.0.100
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

SWITCH = "switch"
CLIENT_ADDRESS = "10.77.0.100"
INTERFACE = "eth0"


def address(node: int) -> str:
    """Return the address of node 1, 2, ..."""
    return f"10.77.0.{node}"


def namespace(node: int) -> str:
    """Its name, for `ip netns exec`."""
    return f"n{node}"


@dataclass
class Network:
    """wires: processes that carry frames, by node, for links that delay or lose them."""

    wires: dict[int, "subprocess.Popen[str]"] = field(default_factory=dict)

    def add_node(self, node: int, wired: bool) -> None:
        """A namespace with a link up. wired: the link's delay and loss can be set, see `impair`."""
        name = namespace(node)
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        if wired:
            self.wires[node] = _wire(name, _port(node))
        else:
            _veth(_port(node), INTERFACE, name)
        _attach(_port(node))
        _address(name, address(node))

    def set_link(self, node: int, up: bool) -> None:
        """Plug the node's cable in, or pull it out: of its other end, so that the node itself sees no change of its
        interface's addresses, only silence."""
        _ip("-n", SWITCH, "link", "set", _port(node), *(["master", "br0"] if up else ["nomaster"]))

    def impair(self, node: int, delay_ms: float, loss: float) -> None:
        """From now on frames of the node's link, in either direction, come delay_ms later and get lost with this
        probability."""
        wire = self.wires[node]
        assert wire.stdin is not None and wire.stdout is not None
        wire.stdin.write(f"{delay_ms} {loss}\n")
        wire.stdin.flush()
        wire.stdout.readline()


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """The bridge and the clients' link; everything is gone afterwards."""
    _ip("netns", "add", SWITCH)
    made = Network()
    try:
        _ip("-n", SWITCH, "link", "add", "name", "br0", "type", "bridge")
        _ip("-n", SWITCH, "link", "set", "br0", "up")
        _ip("link", "add", "name", INTERFACE, "type", "veth", "peer", "name", "clients", "netns", SWITCH)
        _attach("clients")
        _address("", CLIENT_ADDRESS)
        yield made
    finally:
        for wire in made.wires.values():
            wire.kill()
            wire.wait()
        with contextlib.suppress(RuntimeError):
            _ip("link", "del", INTERFACE)
        for name in os.listdir("/run/netns"):
            _ip("netns", "del", name)


def _port(node: int) -> str:
    """The bridge's end of the node's link."""
    return f"port{node}"


def _veth(port: str, interface: str, name: str) -> None:
    _ip("-n", SWITCH, "link", "add", "name", port, "type", "veth", "peer", "name", interface, "netns", name)


def _wire(name: str, port: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.load.wire", f"{SWITCH}:{port}", f"{name}:{INTERFACE}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        process.kill()
        raise RuntimeError("the wire did not start; its error stands above")
    return process


def _attach(port: str) -> None:
    _ip("-n", SWITCH, "link", "set", port, "master", "br0", "up")


def _address(name: str, own: str) -> None:
    within = ["-n", name] if name else []
    _ip(*within, "addr", "add", f"{own}/24", "dev", INTERFACE)
    _ip(*within, "link", "set", INTERFACE, "up")
    _ip(*within, "route", "add", "default", "via", CLIENT_ADDRESS if name else "10.77.0.1")  # how Ray finds its address


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
