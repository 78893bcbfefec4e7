"""What a waiting placement group lacks. Pure: resources are plain numbers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]
_ON_ONE_NODE = ("STRICT_PACK",)
_ON_OWN_NODES = ("STRICT_SPREAD",)


@dataclass(frozen=True)
class NodeRoom:
    """Resources of a living node, by name; in total and free."""

    total: Resources
    free: Resources


def missing(bundles: Sequence[Resources], strategy: str, nodes: Sequence[NodeRoom]) -> str:
    """Return why Ray cannot place `bundles`, in words. strategy: as Ray names it. "" if there is room."""
    wanted = _total(bundles)
    units = [wanted] if strategy in _ON_ONE_NODE else list(bundles)  # what one node must hold
    for unit in units:
        if not any(_fits(unit, node.total) for node in nodes):
            return f"no node has {written(unit)}; the largest {_largest(unit, nodes)}"
    if strategy in _ON_OWN_NODES and len(nodes) < len(bundles):
        return f"needs {len(bundles)} nodes, there are {len(nodes)}"
    total, free = _total([node.total for node in nodes]), _total([node.free for node in nodes])
    short = [name for name, count in wanted.items() if free.get(name, 0) < count - 1e-6]
    if short:
        each = [f"{name} {wanted[name]:g}, free {free.get(name, 0):g} of {total.get(name, 0):g}" for name in short]
        return "needs " + "; ".join(each)
    for unit in units:
        if not any(_fits(unit, node.free) for node in nodes):
            return f"no node has {written(unit)} free: what is free is on several nodes"
    return ""


def written(resources: Resources) -> str:
    """Return resources in words: "CPU 1, GPU 2"."""
    return ", ".join(f"{name} {count:g}" for name, count in sorted(resources.items()))


def _total(each: Sequence[Resources]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for resources in each:
        found.update(resources)
    return dict(found)


def _fits(wanted: Resources, there: Resources) -> bool:
    return all(there.get(name, 0) >= count - 1e-6 for name, count in wanted.items())


def _largest(wanted: Resources, nodes: Sequence[NodeRoom]) -> str:
    most = {name: max((node.total.get(name, 0) for node in nodes), default=0) for name in wanted}
    return f"has {written(most)}"
