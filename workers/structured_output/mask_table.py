"""Grammar masks of a step, a bit for each allowed token, and the guides of the drafts, on the device.
`aerie.workers.structured_output.mask_process.mask_host` writes them in memory shared with the rank (a guide by
`GuideBlock`), `aerie.workers.structured_output.slot_grammars` copies them, `aerie.workers.sampling` and the draft steps
read them."""

import contextlib
import logging
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aerie.kernels.capability import ALIGNED_BYTES, Capability
from aerie.kernels.drafting.guides import MAX_EDGES, MAX_STATES, NO_ORIGIN, NOWHERE, PARTS, GuideTable, block_size
from aerie.kernels.sampling.penalties import FREE

logger = logging.getLogger(__name__)

HELD = -2  # `index` of a slot whose mask is missing, and which emits no token in this step
NUM_SPARE = 4  # masks per slot for positions after its tree
MAX_RUNNING = 256  # entries for requests whose masks are being filled, after the table in shared memory
_ALIGNMENT = ALIGNED_BYTES // 4  # int32 numbers


class MaskTable:
    """Masks of a step's rows, packed in the order of the step: up to `width` per slot (the nodes of its tree), and
    `NUM_SPARE` more in engines with drafts.

    shape: sizes of the table.
    file: descriptor of the shared memory, for the process that fills masks.
    index: [num_slots + 1] int32 on the device, index of the first mask of each slot, `FREE` or `HELD`.
    words: [masks, ceil(vocab_size / 32)] int32 on the device; bit t % 32 of word t // 32 allows token t.
    host_index, host_words: the same on the host. Write them only after the last upload has completed.
    guides, host_guides: guides of the drafts; None in engines without drafts.
    running: [MAX_RUNNING] int64, requests whose masks the process is filling; -1 in unused entries.
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
        capability = Capability.of(device)
        # on a CPU both are one tensor, and an upload does nothing
        self._device = self._host if capability.shares_host_memory else torch.full_like(self._host, FREE, device=device)
        self.index, self.guides, self.words = self.shape.parts(self._device)
        self.host_index, self.host_guides, self.host_words = self.shape.parts(self._host)
        self._stream = None
        if capability.has_streams:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            _pin(self, self._host, device)

    def clear(self) -> None:
        """Clear the masks and guides of all slots on the host."""
        self.host_index.fill_(FREE)
        if self.host_guides is not None:
            self.host_guides.index.fill_(NOWHERE)

    def upload(self, num_rows: int) -> None:
        """Copy the index, the guides and the first `num_rows` masks to the device, on a separate stream, for which the
        current stream waits. Asynchronous for the host."""
        if self._stream is None:
            return
        size = self.shape.before_words + num_rows * self.shape.columns
        with torch.cuda.stream(self._stream):
            self._device[:size].copy_(self._host[:size], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)


class TableShape:
    """Layout of a table in one piece of memory: index, index of the guides, guides, masks.

    before_words: int32 numbers before the masks.
    rows, columns: shape of the masks.
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
        """Size of the table in int32 numbers."""
        return self.before_words + self.rows * self.columns

    @property
    def running_offset(self) -> int:
        """Byte offset of `MaskTable.running`."""
        return 4 * (self.size + self.size % 2)

    @property
    def num_bytes(self) -> int:
        """Size of the shared memory in bytes."""
        return self.running_offset + 8 * MAX_RUNNING

    def parts(self, flat: Tensor) -> tuple[Tensor, GuideTable | None, Tensor]:
        """Split `flat` into index, guides and masks."""
        words, guides = flat[self.before_words :].view(self.rows, self.columns), None
        if self._block:
            index = flat[self._index : self._index + self.num_slots + 1]
            blocks = flat[2 * self._index : self.before_words].view(self.num_slots, self._block)
            guides = GuideTable.of(index, blocks)
        return flat[: self.num_slots + 1], guides, words


def _pin(owner: MaskTable, tensor: Tensor, device: torch.device) -> None:
    """Pin memory for asynchronous copies, and unpin it when `owner` is deleted, because another table may get its
    address."""
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()  # type: ignore[no-untyped-call]
    failed = int(runtime.cudaHostRegister(address, tensor.nbytes, 0))
    if not failed:
        weakref.finalize(owner, runtime.cudaHostUnregister, address)
        return
    logger.warning("the memory of grammar masks could not be pinned; their steps are slower: CUDA error %d", failed)
    with contextlib.suppress(RuntimeError):  # clear CUDA's pending error, which the next torch call would raise
        torch.zeros(1, device=device)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def mask_bytes(width: int, vocab_size: int) -> int:
    """Return the bytes of one slot in a table."""
    one, two = (TableShape(count, width, vocab_size) for count in (_ALIGNMENT, 2 * _ALIGNMENT))
    size = two.before_words - one.before_words + (two.rows - one.rows) * two.columns
    return 4 * size // _ALIGNMENT


class GuideBlock:
    """Writer of one guide. States and edges that do not fit are left out.

    block: [block_size] int32, a row of `GuideTable.blocks`.
    """

    def __init__(self, block: npt.NDArray[np.int32]) -> None:
        width = block.shape[0] - sum(PARTS)
        places = np.cumsum([width, *PARTS])[:-1]
        self.block = block
        self._nodes, self._forced, self._other, self._rows, *edges = np.split(block, places)
        self._origins, self._tokens, self._targets = edges
        self.num_states = 0
        self._num_edges = 0

    def clear(self) -> None:
        """Remove all states and edges."""
        self.block.fill(NOWHERE)
        self._origins.fill(NO_ORIGIN)
        self.num_states = self._num_edges = 0

    @property
    def room(self) -> int:
        """Number of states that still fit."""
        return MAX_STATES - self.num_states

    def set_node(self, node: int, state: int) -> None:
        self._nodes[node] = state

    def add_state(self, forced: int = NOWHERE, row: int = NOWHERE, stays: bool = False) -> int:
        """Add a state. stays: whether a token without an edge leads back to it. Returns the state, or `NOWHERE`."""
        state = self.num_states
        if state == MAX_STATES:
            return NOWHERE
        self._forced[state], self._rows[state] = forced, row
        if stays:
            self._other[state] = state
        self.num_states += 1
        return state

    def add_edges(
        self, origins: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]
    ) -> None:
        """Add edges. All arguments are [n]."""
        since = self._num_edges
        count = min(len(tokens), MAX_EDGES - since)
        for part, values in ((self._origins, origins), (self._tokens, tokens), (self._targets, targets)):
            part[since : since + count] = values[:count]
        self._num_edges += count

    def add_edge(self, origin: int, token: int, target: int) -> None:
        if self._num_edges < MAX_EDGES:
            edge, self._num_edges = self._num_edges, self._num_edges + 1
            self._origins[edge], self._tokens[edge], self._targets[edge] = origin, token, target

    def add_forced_states(self, tokens: npt.NDArray[np.int32]) -> int:
        """Add a state for each of tokens [n], which it forces; all must fit. Returns the first."""
        since = self.num_states
        self.num_states += len(tokens)
        self._forced[since : self.num_states] = tokens
        return since
