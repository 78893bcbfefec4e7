"""Which tokens the requests of a step may choose, as bits on the device, and what their drafts follow. Written by
`workers.structured_output.slot_grammars`, read by `workers.sampling.sampler` and where drafts are made."""

import torch
from torch import Tensor

from workers.structured_output.guide_table import NOWHERE, GuideTable, block_size

FREE = -1  # in the index: this slot's tokens follow no grammar
NUM_SPARE = 4  # masks of a slot for places behind its tree
_ALIGNMENT = 4  # of int32: kernels are compiled for addresses that 16 divides


class MaskTable:
    """Masks of a step's rows: of a slot up to `width` (the nodes of its tree), and `NUM_SPARE` more where there are
    drafts, packed in the order of the step.

    index: [num_slots + 1] int32 on the device, the first mask of each slot, or `FREE`.
    words: [masks, ceil(vocab_size / 32)] int32 on the device; bit t % 32 of word t // 32 allows token t.
    host_index, host_words: the same in pinned memory; whoever changes them knows that the last upload is done.
    guides, host_guides: what drafts follow; None where there are none, which is where trees have but a root.
    """

    def __init__(self, num_slots: int, width: int, vocab_size: int, device: torch.device) -> None:
        self._sizes = _Sizes(num_slots, width, vocab_size)
        size = self._sizes.before_words + self._sizes.rows * self._sizes.columns
        self._device = torch.full((size,), FREE, dtype=torch.int32, device=device)
        # on a CPU there is one of both: writing is uploading
        is_cuda = device.type == "cuda"
        is_shared = device.type == "cpu"
        self._host = self._device if is_shared else torch.full((size,), FREE, dtype=torch.int32, pin_memory=is_cuda)
        self.index, self.guides, self.words = self._sizes.parts(self._device)
        self.host_index, self.host_guides, self.host_words = self._sizes.parts(self._host)
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

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
        size = self._sizes.before_words + num_rows * self._sizes.columns
        with torch.cuda.stream(self._stream):
            self._device[:size].copy_(self._host[:size], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)


class _Sizes:
    """How a table lies in one piece of memory: the index, the guides' index, the guides, the masks."""

    def __init__(self, num_slots: int, width: int, vocab_size: int) -> None:
        self._num_slots = num_slots
        self._index = _aligned(num_slots + 1)
        self._block = _aligned(block_size(width)) if width > 1 else 0
        self.before_words = self._index + (self._index + num_slots * self._block if self._block else 0)
        self.rows = num_slots * (width + NUM_SPARE if width > 1 else width)
        self.columns = -(-vocab_size // 32)

    def parts(self, flat: Tensor) -> tuple[Tensor, GuideTable | None, Tensor]:
        words, guides = flat[self.before_words :].view(self.rows, self.columns), None
        if self._block:
            blocks = flat[2 * self._index : self.before_words].view(self._num_slots, self._block)
            guides = GuideTable.of(flat[self._index : self._index + self._num_slots + 1], blocks)
        return flat[: self._num_slots + 1], guides, words


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def mask_bytes(width: int, vocab_size: int) -> int:
    """Of one slot in a table."""
    one, two = (_Sizes(count, width, vocab_size) for count in (_ALIGNMENT, 2 * _ALIGNMENT))
    size = two.before_words - one.before_words + (two.rows - one.rows) * two.columns
    return 4 * size // _ALIGNMENT
