"""Where the ranks of a group listen: on the address that they were given, and nowhere else."""

import psutil
import torch

from aerie.workers.distributed.tp_group import join_tp_group
from tests.support.ranks import run_ranks

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}  # as `aerie.cluster.environment.pin_network_interface` has it


def _join(rank: int, size: int, address: str) -> tuple[float, list[str]]:
    group = join_tp_group(rank, size, address, torch.device("cpu"))
    total = float(group.all_reduce(torch.ones(1) * (rank + 1)).item())
    listening = psutil.Process().net_connections("inet")
    return total, sorted({c.laddr.ip for c in listening if c.status == psutil.CONN_LISTEN})


def test_ranks_of_one_node_listen_on_the_loopback_only() -> None:
    for total, addresses in run_ranks(_join, 2, environments=[LOOPBACK] * 2):
        assert total == 3.0
        assert set(addresses) <= {"127.0.0.1"}, "someone from outside could reach the store, which asks for no key"
