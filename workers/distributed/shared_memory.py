"""All-reduce and all-gather between ranks on the CPUs of one machine, through shared memory.

Gloo uses a thread on either side, so an all-reduce needs four thread switches: 1 to 2 ms on two cores, 17 times per
pass of the embedded target. Here each rank writes its data to memory that the others read, sets its word, and waits for
the words of the others: 0.2 to 0.4 ms.

`aerie.workers.distributed.tp_group.join_tp_group` connects the ranks once. The memory has no name, so nothing remains
when they end.
"""

import logging
import mmap
import os
import platform
import select
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from aerie.workers.distributed.agreement import boot_id, gather_objects, problems_of_all

logger = logging.getLogger(__name__)

SLOT_BYTES = 1 << 20  # a larger message goes in pieces
_MAX_RANKS = 64  # maximum ranks of a group
_LINE = 8  # 64-bit words per cache line; each rank's word has a line of its own
_WORDS_BYTES = _MAX_RANKS * _LINE * 8
_LOOKS = 2000  # polls of another rank's word (0.1 ms) before a rank sleeps between polls
_NAP_S = 5e-5  # time between two looks of a waiting rank
_PATIENCE_S = 5e-3  # wait after which a rank checks whether the other process still runs


class RankEndedError(RuntimeError):
    """Another rank has ended, or did not write its data in time."""


class SharedMemory:
    """Memory that all ranks map, and the collectives over it.

    Invariant: all ranks make the same calls in the same order, each from one thread. Pieces of a message alternate
    between two slots per rank. Once all ranks have reached a piece, all have read the previous one, so its slot may be
    overwritten. A rank's word is the number of its last piece. Writes before a word are visible before the word: x86
    guarantees this, and `connect_shared_memory` checks for it.

    memory: `region_bytes` zero bytes.
    pids: process ids of all ranks.
    wait_limit_s: maximum wait for another rank's data.
    """

    def __init__(self, rank: int, memory: mmap.mmap, pids: list[int], wait_limit_s: float) -> None:
        self._rank = rank
        self._wait_limit_s = wait_limit_s
        self._words = memoryview(memory)[:_WORDS_BYTES].cast("q")
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=_WORDS_BYTES).view(2, len(pids), SLOT_BYTES)
        self._slots = [list(pair) for pair in slots]
        self._piece = 0
        self._ends = select.poll()
        self._rank_of: dict[int, int] = {}
        for other, pid in enumerate(pids):
            if other != rank:
                descriptor = os.pidfd_open(pid)
                self._rank_of[descriptor] = other
                self._ends.register(descriptor, select.POLLIN)

    def all_reduce(self, x: Tensor) -> None:
        """Replace x, contiguous, with its sum over the ranks. Sums are in rank order, and in float32 for 16-bit dtypes,
        so that all ranks have the same bits. Raises RankEndedError."""
        wide = torch.float32 if x.is_floating_point() and x.itemsize < 4 else x.dtype
        for piece in x.view(-1).split(SLOT_BYTES // x.itemsize):  # type: ignore[no-untyped-call]
            first, *others = self._exchange(piece)
            total = first.to(wide, copy=True)
            for other in others:
                total += other
            piece.copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return [ranks, *x.shape]: x of every rank. Raises RankEndedError."""
        out = torch.empty((len(self._slots[0]), *x.shape), dtype=x.dtype)
        step = SLOT_BYTES // x.itemsize
        pieces = x.contiguous().view(-1).split(step)  # type: ignore[no-untyped-call]
        for index, piece in enumerate(pieces):
            for own, part in zip(out, self._exchange(piece), strict=True):
                own.view(-1)[index * step :][: piece.numel()] = part
        return out

    def _exchange(self, piece: Tensor) -> list[Tensor]:
        """Return every rank's piece, of at most a slot. Valid until the next call but one."""
        self._piece += 1
        slots = self._slots[self._piece % 2]
        parts = [slot[: piece.nbytes].view(piece.dtype) for slot in slots]
        parts[self._rank].copy_(piece)
        self._words[self._rank * _LINE] = self._piece
        for other in range(len(slots)):
            self._wait_for(other)
        return parts

    def _wait_for(self, rank: int) -> None:
        """Wait until another rank has written its current piece: poll, then sleep, then also check that its process
        runs."""
        words, index, piece = self._words, rank * _LINE, self._piece
        for _ in range(_LOOKS):
            if words[index] >= piece:
                return
        began_s = time.monotonic()
        while words[index] < piece:
            time.sleep(_NAP_S)  # with `sched_yield` instead, other processes stalled for a second
            waited_s = time.monotonic() - began_s
            if waited_s > _PATIENCE_S:
                self._check(rank, waited_s)

    def _check(self, rank: int, waited_s: float) -> None:
        """Raise RankEndedError if `rank` has ended or the wait exceeds its limit."""
        if waited_s > self._wait_limit_s:
            raise RankEndedError(f"rank {rank} did not come within {self._wait_limit_s:g} s")
        for descriptor, _ in self._ends.poll(0):
            if self._words[self._rank_of[descriptor] * _LINE] < self._piece:
                raise RankEndedError(f"rank {self._rank_of[descriptor]} has ended")


def region_bytes(ranks: int) -> int:
    """Bytes of the memory of all ranks; unwritten pages take no memory."""
    return _WORDS_BYTES + 2 * ranks * SLOT_BYTES


@dataclass(frozen=True)
class Peer:
    """The process of a rank.

    machine: differs between machines, containers and network namespaces.
    problem: why it cannot use shared memory, or ""."""

    machine: str
    pid: int
    descriptor: int
    problem: str


def why_not(peers: list[Peer]) -> str:
    """Return why these ranks cannot share memory; "" if they may try. peers: in rank order."""
    if len(peers) > _MAX_RANKS:
        return f"there are {len(peers)} ranks, more than {_MAX_RANKS}"
    problems = [f"rank {rank}: {peer.problem}" for rank, peer in enumerate(peers) if peer.problem]
    if problems:
        return "; ".join(problems)
    if len({peer.machine for peer in peers}) > 1:
        return "the ranks are on several machines, or in several containers of one"
    return ""


def connect_shared_memory(group: dist.ProcessGroup, rank: int, size: int, wait_limit_s: float) -> SharedMemory | None:
    """Return this rank's part; None on all ranks if gloo must be used, with the reason logged once. Collective over
    `group`. wait_limit_s: see `SharedMemory`."""
    problem = _problem()
    descriptor = -1
    if rank == 0 and not problem:
        descriptor = os.memfd_create("aerie-ranks", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, region_bytes(size))
    peers: list[Peer] = gather_objects(Peer("" if problem else _machine(), os.getpid(), descriptor, problem), group)
    reason, shared = why_not(peers), None
    if not reason:
        failure = ""
        try:
            shared = SharedMemory(rank, _mapped(peers[0], size), [peer.pid for peer in peers], wait_limit_s)
        except OSError as error:  # /proc of another process may be inaccessible
            failure = f"rank {rank}: {error}"
        reason = problems_of_all(failure, group)
    if descriptor >= 0:
        os.close(descriptor)
    if not reason:
        return shared
    if rank == 0:
        logger.info("sums of tensor parallelism go through gloo, not through shared memory: %s", reason)
    return None


def _problem() -> str:
    """Return why this machine cannot share memory between ranks; "" if it can."""
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    if platform.machine() != "x86_64":
        return f"it needs the order in which x86 writes, this is {platform.machine()}"
    try:
        for descriptor in (os.memfd_create("aerie-trial"), os.pidfd_open(os.getpid())):
            os.close(descriptor)
    except OSError as error:
        return f"it needs memory without a name, and to be told of a process's end: {error}"
    return ""


def _machine() -> str:
    spaces = (Path(f"/proc/self/ns/{kind}").readlink() for kind in ("net", "pid", "mnt"))
    return " ".join([boot_id(), *map(str, spaces)])


def _mapped(first: Peer, size: int) -> mmap.mmap:
    descriptor = os.open(f"/proc/{first.pid}/fd/{first.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, region_bytes(size))
    finally:
        os.close(descriptor)
