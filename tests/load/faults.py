"""How each fault is done to a cluster."""

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping

from tests.load.cluster import Cluster, signal_part
from tests.load.scenario import Fault


def apply(fault: Fault, cluster: Cluster) -> str:
    """Does it; what it met, for the timeline."""
    return _ACTS[fault.kind](dataclasses.replace(fault, node=cluster.node_of(fault)), cluster)


def _kill(fault: Fault, cluster: Cluster) -> str:
    return _signal(fault, cluster, signal.SIGKILL)


def _stop(fault: Fault, cluster: Cluster) -> str:
    return _signal(fault, cluster, signal.SIGSTOP)


def _signal(fault: Fault, cluster: Cluster, number: signal.Signals) -> str:
    found = cluster.find(fault.node, fault.part)
    if not found:
        raise RuntimeError(f"{fault}: node {fault.node} has no process of that kind")
    pids = signal_part(found if fault.all_of_them else found[-1:], number)
    return f"pid {', '.join(map(str, pids))} of {len(found)}"


def _terminate(fault: Fault, cluster: Cluster) -> str:
    assert cluster.serve is not None
    os.killpg(cluster.serve.pid, signal.SIGTERM)
    return f"process group {cluster.serve.pid}"


def _cut(fault: Fault, cluster: Cluster) -> str:
    cluster.network.set_link(fault.node, up=False)
    return ""


def _mend(fault: Fault, cluster: Cluster) -> str:
    cluster.network.set_link(fault.node, up=True)
    return ""


def _power(fault: Fault, cluster: Cluster) -> str:
    cluster.network.set_link(fault.node, up=False)  # first: a dead host sends no FIN and no RST
    num_processes = len(cluster.find(fault.node, ""))
    cluster.kill_node(fault.node)
    return f"{num_processes} processes"


def _impair(fault: Fault, cluster: Cluster) -> str:
    cluster.network.impair(fault.node, fault.delay_ms, fault.loss)
    return ""


def _update(fault: Fault, cluster: Cluster) -> str:
    begin_s = time.monotonic()
    cluster.update(fault.args)
    return f"deployed after {time.monotonic() - begin_s:.1f} s"


def _join(fault: Fault, cluster: Cluster) -> str:
    begin_s = time.monotonic()
    cluster.join(fault.node, fault.cpus)
    return f"{fault.cpus} CPUs, took {time.monotonic() - begin_s:.1f} s"


def _leave(fault: Fault, cluster: Cluster) -> str:
    """Return what a supervisor does that stops `aerie start --block`."""
    starts = [process for process in cluster.find(fault.node, "Ray") if "start" in process.cmdline()]
    return f"pid {signal_part(starts, signal.SIGTERM)}"


_ACTS: Mapping[str, Callable[[Fault, Cluster], str]] = {
    "kill": _kill,
    "stop": _stop,
    "terminate": _terminate,
    "cut": _cut,
    "mend": _mend,
    "power": _power,
    "impair": _impair,
    "update": _update,
    "join": _join,
    "leave": _leave,
}
