"""Which tokens the requests of a step may choose, as bits on the device, and what their drafts follow. Written by
`workers.structured_output.mask_host` in memory that it shares with the rank, brought to the device by
`workers.structured_output.slot_grammars`, read by `workers.sampling.sampler` and where drafts are made."""

import contextlib
import logging
import mmap
import os
import weakref

import numpy as np
import torch
from torch import Tensor

from attention.capability import Capability
from workers.ops.sampling.masks import FREE
from workers.structured_output.guide_table import NOWHERE, GuideTable, block_size

logger = logging.getLogger(__name__)

HELD = -2  # in the index: this slot's mask is missing, and it emits no token in this step
NUM_SPARE = 4  # masks of a slot for positions after its tree
MAX_RUNNING = 256  # requests whose masks are being filled, after the table in shared memory
_ALIGNMENT = 4  # of int32: kernels are compiled for addresses that 16 divides


class MaskTable:
    """Masks of a step's rows: of a slot up to `width` (the nodes of its tree), and `NUM_SPARE` more where there are
    drafts, packed in the order of the step.

    shape: its sizes.
    file: descriptor of the host's side, for the process that fills masks.
    index: [num_slots + 1] int32 on the device, the first mask of each slot, `FREE` or `HELD`.
    words: [masks, ceil(vocab_size / 32)] int32 on the device; bit t % 32 of word t // 32 allows token t.
    host_index, host_words: the same on the host; whoever changes them knows that the last upload is done.
    guides, host_guides: what drafts follow; None where there are none, which is where trees have but a root.
    running: [MAX_RUNNING] int64, requests whose masks the process is filling; -1: none.
    """

    def __init__(self, num_slots: int, width: int, vocab_size: int, device: torch.device) -> None:
        self.shape = TableShape(num_slots, width, vocab_size)
        self.file = os.memfd_create("masks")
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, self.shape.num_bytes)
        memory = mmap.mmap(self.file, self.shape.num_bytes)
        self.running = np.frombuffer(memory, np.int64, MAX_RUNNING, self.shape.running_offset)
        self.running.fill(-1)
        self._host = torch.from_numpy(np.frombuffer(memory, np.int32, self.shape.size))
        self._host[: self.shape.before_words].fill_(FREE)
        here = Capability.of(device)
        # on a CPU there is one of both: writing is uploading
        self._device = self._host if here.shares_host_memory else torch.full_like(self._host, FREE, device=device)
        self.index, self.guides, self.words = self.shape.parts(self._device)
        self.host_index, self.host_guides, self.host_words = self.shape.parts(self._host)
        self._stream = None
        if here.has_streams:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            _pin(self, self._host, device)

    def clear(self) -> None:
        """Nobody has a mask or a guide, until the host's parts are written."""
        self.host_index.fill_(FREE)
        if self.host_guides is not None:
            self.host_guides.index.fill_(NOWHERE)

    def upload(self, num_rows: int) -> None:
        """Bring the host's index, guides and the first `num_rows` masks to the device, beside what runs there: the
        current stream waits for the copy, the host does not."""
        if self._stream is None:
            return
        size = self.shape.before_words + num_rows * self.shape.columns
        with torch.cuda.stream(self._stream):
            self._device[:size].copy_(self._host[:size], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)


class TableShape:
    """How a table lies in one piece of memory: the index, the guides' index, the guides, the masks.

    before_words: int32 numbers before the masks.
    rows, columns: of the masks.
    """

    def __init__(self, num_slots: int, width: int, vocab_size: int) -> None:
        self.num_slots, self.width, self.vocab_size = num_slots, width, vocab_size
        self._index = _aligned(num_slots + 1)
        self._block = _aligned(block_size(width)) if width > 1 else 0
        self.before_words = self._index + (self._index + num_slots * self._block if self._block else 0)
        self.rows = num_slots * (width + NUM_SPARE if width > 1 else width)
        self.columns = -(-vocab_size // 32)

    @property
    def size(self) -> int:
        """int32 numbers of the table."""
        return self.before_words + self.rows * self.columns

    @property
    def running_offset(self) -> int:
        """Bytes before the requests whose masks are being filled."""
        return 4 * (self.size + self.size % 2)

    @property
    def num_bytes(self) -> int:
        """Of the shared memory."""
        return self.running_offset + 8 * MAX_RUNNING

    def parts(self, flat: Tensor) -> tuple[Tensor, GuideTable | None, Tensor]:
        """Index, guides and masks."""
        words, guides = flat[self.before_words :].view(self.rows, self.columns), None
        if self._block:
            index = flat[self._index : self._index + self.num_slots + 1]
            blocks = flat[2 * self._index : self.before_words].view(self.num_slots, self._block)
            guides = GuideTable.of(index, blocks)
        return flat[: self.num_slots + 1], guides, words


def _pin(owner: MaskTable, tensor: Tensor, device: torch.device) -> None:
    """Make copies to the device not wait for the host, until `owner` is gone: CUDA must not know addresses that another
    table may get then."""
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()  # type: ignore[no-untyped-call]
    failed = int(runtime.cudaHostRegister(address, tensor.nbytes, 0))
    if not failed:
        weakref.finalize(owner, runtime.cudaHostUnregister, address)
        return
    logger.warning("masks lie in memory that is not pinned, which slows their steps: CUDA error %d", failed)
    with contextlib.suppress(RuntimeError):  # the error stays with CUDA until a call of torch's has raised it
        torch.zeros(1, device=device)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def mask_bytes(width: int, vocab_size: int) -> int:
    """Of one slot in a table."""
    one, two = (TableShape(count, width, vocab_size) for count in (_ALIGNMENT, 2 * _ALIGNMENT))
    size = two.before_words - one.before_words + (two.rows - one.rows) * two.columns
    return 4 * size // _ALIGNMENT
