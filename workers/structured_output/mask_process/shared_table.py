"""Masks and guides of a step in the process that fills them, in memory shared with the rank. Used by
`aerie.workers.structured_output.mask_process.mask_host`."""

import mmap

import numpy as np
import numpy.typing as npt
import torch

from aerie.workers.structured_output.guide_block import GuideBlock
from aerie.workers.structured_output.mask_process.mask_jobs import Thread
from aerie.workers.structured_output.mask_process.request_grammar import scratch_of
from aerie.workers.structured_output.mask_table import MAX_RUNNING, TableShape


class SharedTable:
    """The shared memory of a `MaskTable`. masks: [rows, w] int32."""

    def __init__(self, memory: mmap.mmap, shape: TableShape) -> None:
        _, guides, words = shape.parts(torch.from_numpy(np.frombuffer(memory, np.int32, shape.size)))
        self.masks: npt.NDArray[np.int32] = words.numpy()
        self.num_words = self.masks.shape[1]
        self.num_rows = self.masks.shape[0] // shape.num_slots  # rows of one request
        self._blocks = None if guides is None else guides.blocks.numpy()
        self._running = np.frombuffer(memory, np.int64, MAX_RUNNING, shape.running_offset)
        self._free = list(range(MAX_RUNNING))
        self._places: dict[int, int] = {}  # index in `_running`, by request

    def new_guide(self) -> GuideBlock | None:
        """Allocate a guide; None in an engine without drafts."""
        return None if self._blocks is None else GuideBlock(np.empty(self._blocks.shape[1], np.int32))

    def set_guide(self, number: int, guide: GuideBlock) -> None:
        """Copy a request's guide to its index in the step."""
        assert self._blocks is not None
        self._blocks[number] = guide.block

    def began(self, number: int) -> None:
        """Record that a request's mask is being filled."""
        if self._free and number not in self._places:
            self._places[number] = self._free.pop()
            self._running[self._places[number]] = number

    def ended(self, number: int) -> None:
        """Remove the record of `began`."""
        place = self._places.pop(number, None)
        if place is not None:
            self._running[place] = -1
            self._free.append(place)


class FillBuffers:
    """Buffers of the leader for one request, copied to the shared table once complete.

    words: [rows, w] int32, masks of the request's tree nodes and of the positions after the tree.
    masks: the same memory, for numpy.
    scratch: [1, w] int32.
    guide: None in an engine without drafts.
    """

    def __init__(self, table: SharedTable) -> None:
        self.thread = Thread()
        self.words = torch.zeros((table.num_rows, table.num_words), dtype=torch.int32)
        self.masks: npt.NDArray[np.int32] = self.words.numpy()
        self.scratch = scratch_of(table.num_words)
        self.guide = table.new_guide()
