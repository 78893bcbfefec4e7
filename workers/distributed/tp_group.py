"""`TPGroup`: the ranks that share a model, and their collectives, which do nothing in a group of one. Passed as an
argument, never global. `ordered_all_reduce`, for deterministic engines, adds in rank order for every size: collectives
only move data there, because a library's order of additions depends on the size of the message."""

import socket
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from aerie.kernels.capability import Capability
from aerie.kernels.collectives.all_reduce import sum_in_order
from aerie.workers.distributed.custom_all_reduce import LIMITS, ORDERED_LIMITS, CustomAllReduce, connect
from aerie.workers.distributed.shared_memory import SharedMemory, connect_shared_memory

GATHERED_BYTES = 64 << 10  # up to this size every rank gets all parts; larger messages are summed in shares

# torch 2.13 deprecates the old name with a warning per call; torch 2.11 has no other.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def ordered_all_reduce(x: Tensor, group: dist.ProcessGroup) -> None:
    """Replace x, contiguous, with its sum over the ranks, the same bits on every rank.

    Large messages move as often as in a ring: each rank receives its share of every part, and sends the share's sum.
    """
    size, flat = group.size(), x.view(-1)
    num = flat.numel()
    if num == 0:
        return
    if num * x.itemsize <= GATHERED_BYTES:
        parts = torch.empty(size * num, dtype=x.dtype, device=x.device)
        all_gather_single(parts, flat, group=group)
        flat.copy_(sum_in_order(parts.view(size, num)))
        return
    share = -(-num // size)
    sent = flat
    if share * size != num:
        sent = torch.nn.functional.pad(flat, (0, share * size - num))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sums = sum_in_order(received.view(size, share))
    if share * size == num:
        all_gather_single(flat, sums, group=group)
    else:
        all_gather_single(received, sums, group=group)
        flat.copy_(received[:num])


JOIN_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class TPGroup:
    """One of `size` ranks.

    process_group: None if size is 1.
    custom: faster all-reduce of small tensors between GPUs; None without.
    shared: used instead of the process group between CPUs of one machine.
    ordered: sums are in rank order for every size of message, in float32, and rounded once.
    """

    rank: int
    size: int
    process_group: dist.ProcessGroup | None = None
    custom: CustomAllReduce | None = None
    shared: SharedMemory | None = None
    ordered: bool = False

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace x, contiguous, with its sum over the ranks, and return it; the same bits on every rank."""
        assert x.is_contiguous()
        if self.shared is not None:
            self.shared.all_reduce(x)
        elif self.process_group is not None and (self.custom is None or not self.custom.all_reduce(x)):
            if self.ordered:
                ordered_all_reduce(x, self.process_group)
            else:
                dist.all_reduce(x, group=self.process_group)
        return x

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Add the sum of x over the ranks to residual, in place, and return its RMSNorm, in one launch. Return None,
        without a change, if that is not possible. All [rows, size], contiguous."""
        # the launch's RMSNorm adds squares in another order than the kernel of many rows
        return None if self.custom is None or self.ordered else self.custom.add_norm(x, residual, weight, eps)

    def all_reduce_buffer(self, rows: int, size: int, dtype: torch.dtype) -> Tensor | None:
        """Return a buffer [rows, size] for the next argument of `all_reduce`, which saves a copy; None if it would not.
        Its content is valid until the buffer is written again."""
        return None if self.custom is None else self.custom.all_reduce_buffer(rows, size, dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return [size, *x.shape]: x of every rank, in rank order."""
        if self.process_group is None:
            return x.unsqueeze(0)
        if self.shared is not None:
            return self.shared.all_gather(x)
        out = torch.empty((self.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        all_gather_single(out, x.contiguous(), group=self.process_group)
        return out.view(self.size, *x.shape)

    def all_gather_last(self, x: Tensor) -> Tensor:
        """Return [..., size * n] for x [..., n], contiguous: the ranks' shards, concatenated along the last
        dimension."""
        if self.process_group is None:
            return x
        return side_by_side(self.all_gather(x))


def side_by_side(gathered: Tensor) -> Tensor:
    """Return [..., size * n] for [size, ..., n], contiguous: the ranks' shards, concatenated along the last
    dimension."""
    return gathered.movedim(0, -2).flatten(-2).contiguous()


SOLO = TPGroup(rank=0, size=1)


def join_tp_group(rank: int, size: int, address: str, device: torch.device, ordered: bool = False) -> TPGroup:
    """Join `size` ranks, which meet at `address` ("tcp://host:port", on rank 0's node). CPUs use gloo, and shared
    memory on one machine. GPUs use NCCL, and custom all-reduces of small tensors if they can map each other's memory.

    ordered: sum in rank order, whatever the size of a message.

    Raises torch.distributed's error if the others do not join within 60 s.
    """
    if size == 1:
        return SOLO
    backend = Capability.of(device).collectives
    dist.init_process_group(
        backend,
        store=_store(address, rank, size),
        rank=rank,
        world_size=size,
        timeout=JOIN_TIMEOUT,
        device_id=device if backend == "nccl" else None,
    )
    world = dist.group.WORLD
    assert world is not None
    if backend == "gloo":
        shared = connect_shared_memory(world, rank, size, JOIN_TIMEOUT.total_seconds())
        return TPGroup(rank, size, world, shared=shared, ordered=ordered)
    limits = ORDERED_LIMITS if ordered else LIMITS
    return TPGroup(rank, size, world, connect(world, rank, size, device, limits), ordered=ordered)


def _store(address: str, rank: int, size: int) -> Store:
    """Return the store by which ranks find each other. It has no authentication, so rank 0 listens only on the given
    address; torch would listen on every interface."""
    where = urlsplit(address)
    assert where.scheme == "tcp" and where.hostname is not None and where.port is not None, address
    listening = None
    if rank == 0:
        listening = socket.create_server((where.hostname, where.port), backlog=size).detach()
    return TCPStore(
        where.hostname, where.port, size, rank == 0, JOIN_TIMEOUT, master_listen_fd=listening, use_libuv=True
    )


def shard_size(total: int, size: int, what: str) -> int:
    """Return total / size. Raises ValueError naming `what` if it is not whole."""
    if total % size:
        divisors = [n for n in range(1, total + 1) if total % n == 0 and n <= 64]
        raise ValueError(f"tensor_parallel={size}: does not divide {what}={total}; try one of {divisors}")
    return total // size
