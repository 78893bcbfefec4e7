"""Resources of the nodes on which engines may be placed: this machine, or a Ray cluster. Imports no torch."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from aerie.cluster.placement import NodeResources


def local_nodes(count: int, cpus: float | None, gpus: float | None) -> list[NodeResources]:
    """Return `count` nodes with this machine's resources, or with the given CPUs and GPUs."""
    cpus = float(os.cpu_count() or 1) if cpus is None else cpus
    capability = None
    if gpus is None:
        here = counted_gpus()()
        gpus, capability = float(here.count), here.capability
    return [NodeResources(f"node{n}", f"node{n}", cpus, gpus, capability) for n in range(count)]


def cluster_nodes() -> list[NodeResources]:
    """Return the resources of the living nodes of the Ray cluster."""
    import ray

    return [
        NodeResources(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


@dataclass(frozen=True)
class LocalGpus:
    """The GPUs of this machine. capability: (major, minor) of all, None if there are none, or several kinds."""

    count: int
    capability: tuple[int, int] | None = None

    @staticmethod
    def listed(text: str) -> "LocalGpus":
        """Parse nvidia-smi's output, which has a line with the compute capability of each GPU."""
        listed = [match for line in text.splitlines() if (match := re.fullmatch(r"(\d+)\.(\d+)", line.strip()))]
        kinds = {(int(match[1]), int(match[2])) for match in listed}
        return LocalGpus(len(listed), kinds.pop() if len(kinds) == 1 else None)


def counted_gpus() -> Callable[[], LocalGpus]:
    """Start to count GPUs; the returned function waits for the result."""
    if shutil.which("nvidia-smi") is None:
        return lambda: LocalGpus(0)
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    counting = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    return lambda: LocalGpus.listed(counting.communicate(timeout=30)[0])
