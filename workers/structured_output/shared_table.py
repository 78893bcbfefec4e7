"""The masks and guides of a step as the process that fills them sees them, in memory that it shares with its rank. Used
by `workers.structured_output.mask_host`."""

import mmap

import numpy as np
import numpy.typing as npt
import torch

from workers.structured_output.guest import scratch_of
from workers.structured_output.guide_table import GuideBlock
from workers.structured_output.mask_jobs import Thread
from workers.structured_output.mask_table import MAX_RUNNING, TableShape


class SharedTable:
    """A `MaskTable`'s shared memory, in this process. masks: [rows, w] int32."""

    def __init__(self, memory: mmap.mmap, shape: TableShape) -> None:
        _, guides, words = shape.parts(torch.from_numpy(np.frombuffer(memory, np.int32, shape.size)))
        self.masks: npt.NDArray[np.int32] = words.numpy()
        self.num_words = self.masks.shape[1]
        self.num_rows = self.masks.shape[0] // shape.num_slots  # of one request
        self._blocks = None if guides is None else guides.blocks.numpy()
        self._running = np.frombuffer(memory, np.int64, MAX_RUNNING, shape.running_offset)
        self._free = list(range(MAX_RUNNING))
        self._places: dict[int, int] = {}  # in `_running`, by request

    def new_guide(self) -> GuideBlock | None:
        """A guide in memory of its own; None in an engine without drafts."""
        return None if self._blocks is None else GuideBlock(np.empty(self._blocks.shape[1], np.int32))

    def set_guide(self, number: int, guide: GuideBlock) -> None:
        """Put a guide in its place in the step."""
        assert self._blocks is not None
        self._blocks[number] = guide.block

    def began(self, number: int) -> None:
        """A request's mask is being filled."""
        if self._free and number not in self._places:
            self._places[number] = self._free.pop()
            self._running[self._places[number]] = number

    def ended(self, number: int) -> None:
        """It is not any more."""
        place = self._places.pop(number, None)
        if place is not None:
            self._running[place] = -1
            self._free.append(place)


class Desk:
    """A leader's thread, and the buffers that it fills before their content is copied to the step's.

    words: [nodes of a tree and positions after it, w] int32, the masks of one request. masks: the same memory.
    scratch: [1, w] int32.
    guide: None in an engine without drafts.
    """

    def __init__(self, table: SharedTable) -> None:
        self.thread = Thread()
        self.words = torch.zeros((table.num_rows, table.num_words), dtype=torch.int32)
        self.masks: npt.NDArray[np.int32] = self.words.numpy()
        self.scratch = scratch_of(table.num_words)
        self.guide = table.new_guide()
