"""Memory for received tensors: the device's while it has some left, else pinned memory of the host.

Steps run meanwhile. Their launches wait for every call that takes memory from the driver or returns it: 0.66 s for
1 GiB of pinned memory, and as long for 16 GB of a device's memory (H200). So a session leaves its memory to the next
one, and pinned memory is taken in small pieces.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.capability import Capability
from aerie.workers.distributed.weight_transfer.wire import as_bytes

SPARE_BYTES = 2 << 30  # left free on a device: steps allocate no more after their dry run
PIECE_BYTES = 16 << 20  # pinned memory allocated at once; an allocation of this size takes about 10 ms


@dataclass(frozen=True)
class HostTensor:
    """A tensor's bytes in the host's memory: uint8 pieces of at most `PIECE_BYTES`, pinned if they came from a GPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Tensor, ...]

    @staticmethod
    def of(tensor: Tensor) -> "HostTensor":
        """Copy a tensor. The copies may not have ended; they are in the current stream's order."""
        pinned = not Capability.of(tensor.device).shares_host_memory
        pieces = []
        for part in _pieces(tensor.contiguous()):
            piece = torch.empty(part.shape, dtype=torch.uint8, pin_memory=pinned)
            pieces.append(piece.copy_(part, non_blocking=True))
        return HostTensor(tuple(tensor.shape), tensor.dtype, tuple(pieces))

    def on(self, device: torch.device) -> Tensor:
        """Return the whole tensor: on `device`, or on the host if the device has no room for it."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        where = device if _free_bytes(device) > num_bytes else torch.device("cpu")
        whole = torch.empty(self.shape, dtype=self.dtype, device=where)
        for part, piece in zip(_pieces(whole), self.pieces, strict=True):
            part.copy_(piece, non_blocking=True)
        return whole


class ReceiveMemory:
    """A rank's memory for the tensors that it receives, in one transfer session after another.

    device: device of the running weights.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._shares_host_memory = Capability.of(device).shares_host_memory
        self._stream: torch.cuda.Stream | None = None  # one for all sessions: a stream's freed memory is its own
        self._used = self._most = 0  # bytes on the device: of this session, and the most of any

    def begin(self) -> None:
        """Begin a session. The tensors of the last one are no longer used."""
        self._used = 0

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        """Run this thread's kernels beside those of steps; afterwards they have ended."""
        if self._shares_host_memory:
            yield
            return
        torch.cuda.set_device(self.device)  # applies to this thread only
        self._stream = self._stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return uninitialised memory on the device, in `own_stream`; None if it has no room."""
        num_bytes = math.prod(shape) * dtype.itemsize
        # torch keeps the memory of earlier sessions, which the driver therefore does not count as free
        if _free_bytes(self.device) + self._most - self._used <= num_bytes + SPARE_BYTES:
            return None
        self._used += num_bytes
        self._most = max(self._most, self._used)
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Return views of a contiguous tensor's bytes."""
    if not tensor.numel():
        return []
    return list(torch.split(as_bytes(tensor), PIECE_BYTES))


def _free_bytes(device: torch.device) -> float:
    """Return the bytes that no process uses; without limit on a CPU."""
    return math.inf if Capability.of(device).shares_host_memory else torch.cuda.mem_get_info(device)[0]
