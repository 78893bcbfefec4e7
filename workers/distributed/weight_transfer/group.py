"""The group of a trainer, rank 0, and the ranks of all engines. It is separate from the ranks' own group, so that
weights arrive while steps run. No message of it is unpickled."""

import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_RETRY_S = 0.05  # delay before the next attempt to connect


class TransferError(Exception):
    """The other end is lost, or takes too long. The group cannot be used again."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of a group meet.

    address, port: address of the store that rank 0 opens; "": none, with `unique_id`.
    size: number of members: the trainer and all ranks.
    timeout_s: limit for joining, and for each broadcast.
    unique_id: NCCL's 128 bytes, which replace the store; b"": the store has them.
    """

    address: str
    port: int
    rank: int
    size: int
    timeout_s: float
    unique_id: bytes = b""


class TransferGroup(Protocol):
    """A member's end of a group."""

    def broadcast(self, tensor: Tensor) -> None:
        """Send uint8 [bytes], contiguous, from rank 0 to all others, and wait for it. Raises TransferError."""

    def close(self) -> None:
        """Leave the group; others that wait for this rank get an error. May be called in another thread, whose
        broadcast goes on to its end or its time limit."""


def open_store(where: Rendezvous) -> Store:
    """Return the store by which members meet. Rank 0 listens only on the given address. Raises TransferError."""
    listening = None
    try:
        if where.rank == 0:
            listening = socket.create_server((where.address, where.port), backlog=where.size).detach()
        else:
            _await_listener(where)
        return TCPStore(
            where.address,
            where.port,
            where.size,
            where.rank == 0,
            timedelta(seconds=where.timeout_s),
            wait_for_workers=True,
            master_listen_fd=listening,
            use_libuv=True,
        )
    except (RuntimeError, OSError) as error:
        address = f"{where.address}:{where.port}"
        raise TransferError(f"no group of {where.size} members at {address}: {_first_line(error)}") from None


def _await_listener(where: Rendezvous) -> None:
    """Wait until the trainer listens, because TCPStore logs every failed attempt with a stack. Raises OSError."""
    deadline = time.monotonic() + where.timeout_s
    while True:
        try:
            socket.create_connection((where.address, where.port), where.timeout_s).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


class GlooGroup:
    """A group of CPUs."""

    def __init__(self, where: Rendezvous) -> None:
        """Join. Raises TransferError if others do not come in time."""
        if where.unique_id:
            raise TransferError("nccl_unique_id_b64 is for GPUs; give master_address and master_port")
        self._timeout_s = where.timeout_s
        self._store = open_store(where)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=where.timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(where))]
        try:
            store = PrefixStore("weights", self._store)
            self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(store, where.rank, where.size, options)
        except RuntimeError as error:
            raise TransferError(f"not all {where.size} members came: {_first_line(error)}") from None

    def broadcast(self, tensor: Tensor) -> None:
        group = self._group
        if group is None:
            raise TransferError("the transfer was closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            group.broadcast([tensor], options).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise TransferError(f"the transfer failed: {_first_line(error)}") from None

    def close(self) -> None:
        self._group = None  # closes its connections, once no broadcast waits; torch 2.13's `abort` does not


def _own_address(where: Rendezvous) -> str:
    """Return the address by which this host reaches the trainer; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((where.address, where.port))
        except OSError:
            return where.address
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    """Return the first sentence of an error, without the place in gloo's source."""
    first = str(error).partition("cc:")[2].partition("] ")[2] or str(error)
    return first.partition("\n")[0].partition(". This is")[0] or type(error).__name__
