"""All-reduces without NCCL between the GPUs of one node: each rank maps the others' memory, over PyTorch's symmetric
memory without NVLink multicast.

`aerie.workers.distributed.tp_group.join_tp_group` connects the ranks once, before any graph is captured; `TPGroup`
tries this first. The method depends only on shape, dtype and number of ranks, so all ranks choose the same. All state
is on the device, so it works the same in a captured graph.

`choose` is not an operation's table: callers ask for the method before there is a tensor (`all_reduce_buffer`), and all
ranks must choose the same, so a method that one rank's device lacks is excluded for all, once, in `connect`.
"""

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from aerie.kernels.collectives.all_reduce import one_shot_all_reduce
from aerie.workers.distributed.agreement import boot_id, gather_objects, problems_of_all

logger = logging.getLogger(__name__)


class Method(Enum):
    """A method of summing. ONE_SHOT and TWO_SHOT give the same bits on every rank.

    ONE_SHOT: `aerie.kernels.collectives.all_reduce`, which sums in float32 in rank order.
    TWO_SHOT: each rank sums its share of the elements and sends it to the others (symm_mem.two_shot_all_reduce).
    """

    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    NCCL = "nccl"


@dataclass(frozen=True)
class Limits:
    """Maximum message size of each method, in bytes; NCCL above `two_shot`."""

    one_shot: int
    two_shot: int


# Key: number of ranks. Measured on H200s (NVLink 4, no multicast, torch 2.11, NCCL 2.28.9, in a CUDA graph, bfloat16,
# rows of 8192, with the residual add and RMSNorm that follow) by `python -m tests.bench all_reduce`. us for NCCL /
# two-shot / one-shot, 2 ranks: 16 KB 8.1 / 8.4 / 5.0, 256 KB 10.0 / 9.2 / 5.7, 1 MB 15.5 / 11.9 / 10.2, 1.8 MB 28.3 /
# 14.7 / 14.6, 16 MB 91.3 / 74.1 / -. 4 ranks: 16 KB 12.3 / 8.5 / 6.9, 128 KB 13.0 / 10.7 / 7.8, 256 KB 13.1 / 10.8 /
# 10.0, 512 KB 16.2 / 11.4 / 14.7, 16 MB 114 / 106 / -. Other numbers of ranks use NCCL.
LIMITS = {
    2: Limits(one_shot=1 << 20, two_shot=16 << 20),
    4: Limits(one_shot=256 << 10, two_shot=16 << 20),
}

# Limits of groups that sum in rank order. TWO_SHOT promises no order, so `ordered_all_reduce` sums larger messages.
# 8 ranks are not measured: their limit has a rank receive as many bytes as with 4.
ORDERED_LIMITS = {
    2: Limits(one_shot=1 << 20, two_shot=0),
    4: Limits(one_shot=256 << 10, two_shot=0),
    8: Limits(one_shot=128 << 10, two_shot=0),
}

# Maximum rows of ONE_SHOT, one program each. All programs must run at once, and the smallest H100 has 114
# multiprocessors.
MAX_ROWS = 112
_MAX_WORDS = 16384  # 64-bit words that one program of ONE_SHOT holds in registers: 32 in each of 512 threads
_OPERATORS = ("two_shot_all_reduce_", "two_shot_all_reduce_out")


def choose(limits: Limits, ranks: int, rows: int, width: int, dtype: torch.dtype) -> Method:
    """Return the method for [rows, width] of dtype."""
    num_bytes = rows * width * dtype.itemsize
    if num_bytes <= limits.one_shot and _fits_one_shot(ranks, rows, width, dtype):
        return Method.ONE_SHOT
    # the operators move 16 bytes at a time and support these types
    if 0 < num_bytes <= limits.two_shot and num_bytes % 16 == 0 and dtype in (torch.bfloat16, torch.float32):
        return Method.TWO_SHOT
    return Method.NCCL


def _fits_one_shot(ranks: int, rows: int, width: int, dtype: torch.dtype) -> bool:
    if dtype not in (torch.bfloat16, torch.float16) or width % 2 or ranks & (ranks - 1):
        return False
    words = 1 << (width // 2 - 1).bit_length()
    return 0 < rows <= MAX_ROWS and ranks * words <= _MAX_WORDS


class CustomAllReduce:
    """Collectives over memory that all ranks map.

    All ranks make the same calls in the same order, each rank on one stream.

    regions: the memory of every rank, mapped by this device: [`region_bytes`] uint8 each, zero from `limits.two_shot`
        on. This rank's own region is the tensor that symmetric memory allocated.
    group_name: the process group over which regions were exchanged.
    """

    def __init__(self, rank: int, limits: Limits, regions: Sequence[Tensor], group_name: str) -> None:
        self.limits = limits
        self._rank = rank
        self._size = len(regions)
        self._regions = tuple(regions)  # the mapping of another rank's memory ends with its tensor
        region = regions[rank]
        self._staging = region[: limits.two_shot]
        self._words = region[limits.two_shot :].view(torch.int64)
        addresses = [other.data_ptr() + limits.two_shot for other in regions]
        self._inboxes = torch.tensor(addresses, dtype=torch.int64).to(region.device)
        self._epochs = torch.zeros(MAX_ROWS, dtype=torch.int32, device=region.device)
        self._inbox: Tensor | None = None  # allocated for the first width that is summed
        self._group_name = group_name

    def method(self, rows: int, width: int, dtype: torch.dtype) -> Method:
        """Return the method for [rows, width] of dtype. The inbox is used only with the first width, because call
        numbers rely on it."""
        method = choose(self.limits, self._size, rows, width, dtype)
        if method is Method.ONE_SHOT and self._inbox is not None and self._inbox.shape[-1] != width // 2:
            return choose(Limits(0, self.limits.two_shot), self._size, rows, width, dtype)
        return method

    def all_reduce_buffer(self, rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Return a buffer [rows, width] for the next all-reduce's input, which saves a copy; None if there is no gain.
        Its content is valid until the next call."""
        if self.method(rows, width, dtype) is not Method.TWO_SHOT:
            return None
        return self._staged(rows, width, dtype)

    def all_reduce(self, x: Tensor) -> bool:
        """Replace x [rows, width], contiguous, with its sum over the ranks. Return False, without a change, if NCCL is
        faster. Blocks the stream until every rank has called."""
        if x.dim() != 2:
            return False
        method = self.method(x.shape[0], x.shape[1], x.dtype)
        if method is Method.ONE_SHOT:
            self._one_shot(x, x, None)
        elif method is Method.TWO_SHOT:
            self._two_shot(x)
        return method is not Method.NCCL

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Add the sum of x over the ranks to residual, in place, and return its RMSNorm [rows, width], in one launch.
        Return None, without a change, if that is not possible. weight: [width] of x's dtype or float32. All
        contiguous."""
        if self.method(x.shape[0], x.shape[1], x.dtype) is not Method.ONE_SHOT:
            return None
        out = torch.empty_like(x)
        self._one_shot(x, out, (residual, weight, eps))
        return out

    def _one_shot(self, x: Tensor, out: Tensor, norm: tuple[Tensor, Tensor, float] | None) -> None:
        """Run the one-shot all-reduce. The first call divides the inbox by the width of its rows, for all calls."""
        if self._inbox is None:
            pairs = x.shape[1] // 2
            capacity = min(self.limits.one_shot // (4 * pairs), len(self._epochs))
            self._inbox = self._words[: 2 * capacity * self._size * pairs].view(2, capacity, self._size, pairs)
            self._epochs = self._epochs[:capacity]
        one_shot_all_reduce(x, self._inbox, self._inboxes, self._epochs, self._rank, out, norm)

    def _two_shot(self, x: Tensor) -> None:
        """All-reduce x in place. Both operators end with a barrier, after which no rank uses this rank's staging
        memory."""
        if x.data_ptr() == self._staging.data_ptr():
            torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", self._group_name)
            return
        staged = self._staged(x.shape[0], x.shape[1], x.dtype)
        staged.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(staged, "sum", self._group_name, x)

    def _staged(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self._staging[: rows * width * dtype.itemsize].view(dtype).view(rows, width)


def region_bytes(limits: Limits, ranks: int) -> int:
    """Bytes of a rank's shared memory: staging for two_shot, then two halves of words from each rank, 8 bytes per 4."""
    return limits.two_shot + 2 * ranks * 2 * limits.one_shot


@dataclass(frozen=True)
class Peer:
    """The process of a rank. host: differs between machines, and between containers that do not share /tmp's sockets or
    names. torch_problem: what its torch or Triton lacks; "" for nothing."""

    host: str
    gpu: str
    num_processors: int
    torch_problem: str


def why_not(peers: Sequence[Peer], limits: dict[int, Limits]) -> str:
    """Return why these ranks cannot map each other's memory; "" if they may try. peers: in rank order."""
    if len(peers) not in limits:
        return f"no measurements for {len(peers)} ranks, only for {sorted(limits)}"
    problems = [f"rank {rank}: {peer.torch_problem}" for rank, peer in enumerate(peers) if peer.torch_problem]
    if problems:
        return "; ".join(problems)
    if len({peer.host for peer in peers}) > 1:
        return f"the ranks are on several hosts: {[peer.host for peer in peers]}"
    if len({peer.gpu for peer in peers}) < len(peers):
        return f"ranks share a GPU: {[peer.gpu for peer in peers]}"
    fewest = min(peer.num_processors for peer in peers)
    if fewest < MAX_ROWS:
        return f"a GPU has {fewest} multiprocessors, at least {MAX_ROWS} are needed"
    return ""


def connect(
    group: dist.ProcessGroup, rank: int, size: int, device: torch.device, limits: dict[int, Limits] = LIMITS
) -> CustomAllReduce | None:
    """Return this rank's part; None on all ranks if NCCL must be used, with the reason logged once. Collective over
    `group`, whose backend is NCCL and whose ranks use different devices."""
    peers: list[Peer] = gather_objects(_own_peer(device), group)
    reason = why_not(peers, limits)
    regions: list[Tensor] = []
    # Each step may fail on a single rank. So no step contains a collective, and all ranks exchange its outcome before
    # the next.
    for step in (_map_regions, _sign_region, _check_regions):
        failure = ""
        if not reason:
            try:
                step(regions, region_bytes(limits[size], size), group, rank, size, device)
            except RuntimeError as error:  # no peer access, handles not shared, or refused by the driver
                failure = f"rank {rank}: {str(error).splitlines()[0]}"
            reason = problems_of_all(failure, group)
    if not reason:
        return CustomAllReduce(rank, limits[size], regions, group.group_name)
    if rank == 0:
        logger.warning("all-reduces of tensor parallelism go through NCCL, not our own: %s", reason)
    return None


def _map_regions(
    regions: list[Tensor], num_bytes: int, group: dist.ProcessGroup, rank: int, size: int, device: torch.device
) -> None:
    """Fill `regions`. The ranks exchange handles through the group's store, whose timeout bounds the wait."""
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, group)
    regions += [own if peer == rank else handle.get_buffer(peer, (num_bytes,), torch.uint8) for peer in range(size)]


def _sign_region(
    regions: list[Tensor], num_bytes: int, group: dist.ProcessGroup, rank: int, size: int, device: torch.device
) -> None:
    regions[rank].zero_()
    regions[rank][:8].fill_(rank + 1)
    torch.cuda.synchronize(device)


def _check_regions(
    regions: list[Tensor], num_bytes: int, group: dist.ProcessGroup, rank: int, size: int, device: torch.device
) -> None:
    seen = [int(region[:8].sum()) // 8 for region in regions]
    if seen != list(range(1, size + 1)):
        raise RuntimeError(f"peer memory reads {seen} where the ranks wrote 1 to {size}")


def _own_peer(device: torch.device) -> Peer:
    properties = torch.cuda.get_device_properties(device)
    host = f"{socket.gethostname()} {boot_id()}"
    return Peer(host, str(properties.uuid), properties.multi_processor_count, _torch_problem())


def _torch_problem() -> str:
    """Return why torch cannot map the memory of other GPUs; "" if it can."""
    try:
        import torch.distributed._symmetric_memory
        import triton  # noqa: F401
    except ImportError as error:
        return str(error)
    missing = [name for name in _OPERATORS if not hasattr(torch.ops.symm_mem, name)]
    return f"torch {torch.__version__} lacks symm_mem operators {missing}" if missing else ""
