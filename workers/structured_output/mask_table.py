"""Which tokens the requests of a step may choose, as bits on the device. Written by
`workers.structured_output.slot_grammars`, read by `workers.sampling.sampler`."""

import torch
from torch import Tensor

FREE = -1  # in the index: this slot's tokens follow no grammar
_ALIGNMENT = 4  # of int32: kernels are compiled for addresses that 16 divides


class MaskTable:
    """Masks of a step's rows: of a slot up to `width` (the nodes of its tree), packed in the order of the step.

    index: [num_slots + 1] int32 on the device, the first mask of each slot, or `FREE`.
    words: [num_slots * width, ceil(vocab_size / 32)] int32 on the device; bit t % 32 of word t // 32 allows token t.
    host_index, host_words: the same in pinned memory; whoever changes them knows that the last upload is done.
    """

    def __init__(self, num_slots: int, width: int, vocab_size: int, device: torch.device) -> None:
        rows, columns = num_slots * width, -(-vocab_size // 32)
        self._index_size = -(-(num_slots + 1) // _ALIGNMENT) * _ALIGNMENT
        size = self._index_size + rows * columns
        self._device = torch.full((size,), FREE, dtype=torch.int32, device=device)
        # on a CPU there is one of both: writing is uploading
        is_cuda = device.type == "cuda"
        self._host = torch.full((size,), FREE, dtype=torch.int32, pin_memory=True) if is_cuda else self._device
        self.index, self.words = self._parts(self._device, num_slots, rows, columns)
        self.host_index, self.host_words = self._parts(self._host, num_slots, rows, columns)
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def _parts(self, flat: Tensor, num_slots: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return flat[: num_slots + 1], flat[self._index_size :].view(rows, columns)

    def upload(self, num_rows: int) -> None:
        """Bring the host's index and the first `num_rows` masks to the device, beside what runs there: the current
        stream waits for the copy, the host does not."""
        if self._stream is None:
            return
        size = self._index_size + num_rows * self.words.shape[1]
        with torch.cuda.stream(self._stream):
            self._device[:size].copy_(self._host[:size], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)


def mask_bytes(width: int, vocab_size: int) -> int:
    """Of one slot in a table."""
    return 4 * (1 + width * -(-vocab_size // 32))
