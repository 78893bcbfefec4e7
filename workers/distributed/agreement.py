"""Exchanges between ranks before they agree on how to communicate."""

from pathlib import Path
from typing import Any

import torch.distributed as dist


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return `mine` of every rank, in rank order. Collective over `group`."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def problems_of_all(mine: str, group: dist.ProcessGroup) -> str:
    """Join the problems of all ranks; "" means none. Collective over `group`."""
    return "; ".join(filter(None, gather_objects(mine, group)))


def boot_id() -> str:
    """Return an id of this boot of this machine; "" if the system has none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
