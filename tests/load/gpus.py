"""GPUs of this machine shared out to the nodes of a scenario, and what a node's processes must see to take it for a
host of its own. Pure but for `visible_gpus`.
"""

import functools
from collections.abc import Mapping, Sequence

from aerie.deploy.nodes import counted_gpus
from tests.load.scenario import Hosts

# Before a command that is to run under another host name, which is its first argument.
_NAMED = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execvp(sys.argv[2], sys.argv[2:])"


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(number) for number in range(_num_here())]


_num_here = functools.cache(lambda: counted_gpus()().count)


def too_few(hosts: Hosts, visible: Sequence[str]) -> str:
    """Why these nodes cannot be had here; "" if they can."""
    wanted = sum(hosts.gpus)
    return f"its nodes have {wanted} GPUs in all, and this machine {len(visible)}" if wanted > len(visible) else ""


def node_environment(hosts: Hosts, node: int, visible: Sequence[str]) -> dict[str, str]:
    """What a node's processes have in their environment beside everyone's: nodes take GPUs in turn, each its number.
    Nothing where the scenario has no GPUs."""
    own = {name: value.replace("{node}", str(node)) for name, value in hosts.environment.items()}
    if not hosts.gpus:
        return own
    before = sum(hosts.gpus[: node - 1])
    devices = visible[before : before + num_gpus(hosts, node)]
    return own | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


def num_gpus(hosts: Hosts, node: int) -> int:
    """Return the GPUs of a node; 0 for one that joins later."""
    return hosts.gpus[node - 1] if node <= len(hosts.gpus) else 0


def host_name(hosts: Hosts, name: str, python: str) -> list[str]:
    """What comes before a node's command so that it runs under the host name `name`; nothing where nodes share this
    machine's."""
    return ["unshare", "--uts", python, "-c", _NAMED, name] if hosts.host_names else []
