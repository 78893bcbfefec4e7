"""A transfer's group by NCCL's C library, with the rendezvous of vLLM's `StatelessProcessGroup` and
`PyNcclCommunicator` (vLLM 0.33): rank 0 publishes NCCL's unique id in the store, and every member
does one all-reduce of one number.

torch's own groups have another rendezvous. The pickled id of vLLM's trainers is read without unpickling it.
"""

import ctypes
import pickletools
import threading
import time

import torch
from torch import Tensor

from aerie.workers.distributed.weight_transfer.group import Rendezvous, TransferError, open_store

_ID_BYTES = 128  # size of ncclUniqueId
_ID_KEY = "broadcast_from/0/0"
_UINT8, _FLOAT32, _SUM = 1, 7, 0  # of nccl.h
_POLL_S = 0.0005  # time between two looks


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _ID_BYTES),)


class NCCLGroup:
    """A group of GPUs. Broadcasts run on a stream of their own."""

    def __init__(self, where: Rendezvous, device: torch.device) -> None:
        """Join. Blocks until all members come; with a store, no longer than `timeout_s`. Raises TransferError."""
        try:
            self._nccl = ctypes.CDLL("libnccl.so.2")  # torch has loaded it
        except OSError as error:
            raise TransferError(f"NCCL's library cannot be loaded: {error}") from None
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._device, self._timeout_s = device, where.timeout_s
        self._is_closed = threading.Lock()  # held once the group is closed
        torch.cuda.set_device(device)  # of this thread
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._comm = ctypes.c_void_p()
        unique_id = _UniqueId.from_buffer_copy(self._unique_id(where))
        self._call("ncclCommInitRank", ctypes.byref(self._comm), where.size, unique_id, where.rank)
        token = torch.zeros(1, device=device)
        torch.cuda.current_stream(device).synchronize()
        self._run("ncclAllReduce", token, token, 1, _FLOAT32, _SUM)

    def _unique_id(self, where: Rendezvous) -> bytes:
        """Return NCCL's id of the group: the given one, or the trainer's (rank 0), through the store."""
        if where.unique_id:
            return where.unique_id
        self._store = open_store(where)
        if where.rank:
            try:
                return id_of(self._store.get(_ID_KEY))
            except RuntimeError as error:
                raise TransferError(f"the trainer published no unique id of NCCL: {error}") from None
        made = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(made))
        self._store.set(_ID_KEY, bytes(made))  # type: ignore[arg-type]
        return bytes(made)

    def broadcast(self, tensor: Tensor) -> None:
        torch.cuda.current_stream(self._device).synchronize()  # what wrote `tensor`
        self._run("ncclBroadcast", tensor, tensor, tensor.numel(), _UINT8, 0)

    def _run(self, name: str, source: Tensor, target: Tensor, *arguments: int) -> None:
        """Call a collective and wait for it. Raises TransferError, and leaves the group, after the time limit."""
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (source, target))
        count, *rest = arguments
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        self._call(name, *pointers, ctypes.c_size_t(count), *rest, self._comm, stream)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        deadline = time.monotonic() + self._timeout_s
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                self.close()
                raise TransferError(f"no broadcast of the trainer in {self._timeout_s:g} s")
            if self._is_closed.locked():
                raise TransferError("the transfer was closed")
            time.sleep(_POLL_S)

    def close(self) -> None:
        if self._comm and self._is_closed.acquire(blocking=False):
            self._nccl.ncclCommAbort(self._comm)  # ends its kernels, which would wait for ever

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._nccl, name)(*arguments):
            raise TransferError(f"{name}: {self._nccl.ncclGetErrorString(code).decode()}")


def id_of(stored: bytes) -> bytes:
    """Return the unique id in a store's value: its 128 bytes, or a pickle that contains them, which is not executed.
    Raises TransferError."""
    if len(stored) == _ID_BYTES:
        return stored
    try:
        candidates = [value for _, value, _ in pickletools.genops(stored) if isinstance(value, bytes)]
    except ValueError:
        candidates = []
    if [len(candidate) for candidate in candidates] != [_ID_BYTES]:
        raise TransferError("the trainer's unique id is not readable; give nccl_unique_id_b64 instead")
    return candidates[0]
