"""Inputs of a captured step: tensors at fixed addresses, filled from a batch before each replay.

Unused entries are padding: the padding slot, chunks without rows on the dummy page, and rows that belong to no chunk.
"""

import torch
from torch import Tensor

from aerie.kernels.kv.batches import PrefillBatch, RowInputs
from aerie.workers.runner.batch import PromptChunks, StepBatch
from aerie.workers.sampling import SamplingNeeds
from aerie.workers.slots import SlotTable

MAX_CHUNKS = 8  # prompt chunks of a captured step; each adds a row to the vocabulary head and to every draft step


class SlotInput:
    """Slots of a step. tensor: [size] int64; unused entries are the padding slot."""

    def __init__(self, size: int, padding_slot: int, device: torch.device) -> None:
        self.tensor = torch.full((size,), padding_slot, dtype=torch.int64, device=device)
        self._padding_slot = padding_slot
        self._filled: Tensor | None = None

    def fill(self, slots: Tensor) -> None:
        """Copy a batch's slots, unless it is the tensor of the last call. Slot tensors never change in place."""
        if self._filled is not slots:
            self.tensor[: slots.shape[0]] = slots
            self.tensor[slots.shape[0] :] = self._padding_slot
            self._filled = slots


class ChunkInput:
    """Up to `MAX_CHUNKS` prompt chunks, any of which may end its prompt.

    num_rows: maximum prompt tokens of all chunks together.
    seen_limit: see `PrefillBatch`.
    has_states: whether the model has recurrent layers.
    has_row_index: whether layers ask for their rows' slots (`aerie.workers.layers.forward_context.RowIndex`).
    image_values: [num_rows or more, values] for rows of images, in memory that all steps share; None in models whose
        captured steps have no images. With images, rows have `SlotTable.num_axes` positions (M-RoPE).
    """

    def __init__(
        self,
        num_rows: int,
        seen_limit: int | None,
        slots: SlotTable,
        has_states: bool = False,
        has_row_index: bool = False,
        image_values: Tensor | None = None,
    ) -> None:
        device, count = slots.device, MAX_CHUNKS

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._num_rows, self._seen_limit = num_rows, seen_limit
        self._qo_indptr = zeros(torch.int32, count + 1)
        self._starts = zeros(torch.int32, count)
        self._page_table = zeros(torch.int32, count, slots.page_table.shape[1])
        self._ids = zeros(torch.int64, num_rows)
        self._next_ids = zeros(torch.int64, count)
        needs_slots = has_states or has_row_index
        self._slots = SlotInput(count, slots.padding_slot, device) if needs_slots else None
        self._store_from, self._saved_at, self._saved_row = (
            zeros(dtype, count) if has_states else None for dtype in (torch.int32, torch.int32, torch.int64)
        )
        self._inputs: RowInputs | None = None
        if image_values is not None:
            mask, positions = zeros(torch.bool, num_rows), zeros(torch.int64, slots.num_axes, num_rows)
            self._inputs = RowInputs(None, None, positions, image_values=image_values[:num_rows], image_mask=mask)
        self._final_slots = SlotInput(count, slots.padding_slot, device)
        self._final_lengths = zeros(torch.int32, count)

    def chunks(self) -> PromptChunks:
        """Return these inputs as the chunks of a new batch. Every run needs a new batch, because a batch caches values
        that it computes from its tensors."""
        batch = PrefillBatch(
            self._qo_indptr,
            self._starts,
            self._page_table,
            self._num_rows,
            lists=None,
            seen_limit=self._seen_limit,
            store_from=self._store_from,
            slots=None if self._slots is None else self._slots.tensor,
            saved_at=self._saved_at,
            saved_row=self._saved_row,
            inputs=self._inputs,
        )
        return PromptChunks(
            batch=batch,
            ids=self._ids,
            next_ids=self._next_ids,
            final_slots=self._final_slots.tensor,
            final_lengths=self._final_lengths,
        )

    def fill(self, chunks: PromptChunks) -> None:
        """Copy the chunks of a batch. They must fit."""
        batch, num_finals = chunks.batch, chunks.num_finals
        count = batch.num_chunks
        self._qo_indptr[: count + 1] = batch.qo_indptr
        self._qo_indptr[count + 1 :] = batch.num_rows
        self._starts[:count] = batch.starts
        self._starts[count:] = 0
        self._page_table[:count] = batch.page_table
        self._page_table[count:] = 0
        self._ids[: batch.num_rows] = chunks.ids
        self._next_ids[:count] = chunks.next_ids
        self._final_slots.fill(chunks.final_slots)
        if self._slots is not None:
            assert batch.slots is not None, "chunks without their slots"
            self._slots.fill(batch.slots)
        if self._store_from is not None:
            self._fill_states(batch)
        if self._inputs is not None:
            self._fill_inputs(self._inputs, batch)
        self._final_lengths[:num_finals] = chunks.final_lengths
        self._final_lengths[num_finals:] = 0

    def _fill_inputs(self, own: RowInputs, batch: PrefillBatch) -> None:
        """Padding rows keep positions of earlier steps."""
        given = batch.inputs
        assert given is not None and given.positions is not None, "rows of models with M-RoPE have positions"
        assert own.positions is not None and own.image_mask is not None and own.image_values is not None
        own.positions[:, : batch.num_rows] = given.positions
        own.image_mask.zero_()
        if given.image_rows is not None and given.image_values is not None:
            own.image_mask.index_fill_(0, given.image_rows, True)
            own.image_values.index_copy_(0, given.image_rows, given.image_values)

    def _fill_states(self, batch: PrefillBatch) -> None:
        """Copy which states are saved, and padding for further chunks, to the graph's inputs."""
        inputs = (self._store_from, 0), (self._saved_at, -1), (self._saved_row, 0)
        for (own, padding), values in zip(inputs, (batch.store_from, batch.saved_at, batch.saved_row), strict=True):
            assert own is not None
            own.fill_(padding)
            if values is not None:
                own[: batch.num_chunks] = values


class StepInput:
    """Inputs of a captured step: rounds and, unless `num_rows` is 0, prompt chunks.

    bucket: rounds, including padding.
    num_rows, seen_limit, has_states, has_row_index, image_values: as in `ChunkInput`.
    """

    def __init__(
        self,
        bucket: int,
        num_rows: int,
        seen_limit: int | None,
        slots: SlotTable,
        has_states: bool = False,
        has_row_index: bool = False,
        image_values: Tensor | None = None,
    ) -> None:
        self._bucket = bucket
        per_chunk = has_states, has_row_index, image_values
        self._chunks = ChunkInput(num_rows, seen_limit, slots, *per_chunk) if num_rows else None
        self._padding_slot = slots.padding_slot
        self._always_shifts = slots.always_shifts
        self._slots = SlotInput(bucket, slots.padding_slot, slots.device)
        entries = bucket + (MAX_CHUNKS if num_rows else 0)
        self._draft_slots = SlotInput(entries, slots.padding_slot, slots.device)

    def batch(
        self, shape: int, next_shape: int, max_kv_len: int, needs: SamplingNeeds, adapted: bool = False
    ) -> StepBatch:
        """Return a new batch of the full size over these inputs."""
        chunks = self._chunks.chunks() if self._chunks is not None else None
        return StepBatch(
            self._slots.tensor,
            shape,
            next_shape=next_shape,
            draft_slots=self._draft_slots.tensor,
            max_kv_len=max_kv_len,
            chunks=chunks,
            needs=needs,
            is_shifted=self._always_shifts,
            shift_is_captured=self._always_shifts,
            adapted=adapted,
        )

    def fill(self, batch: StepBatch) -> None:
        """Copy a batch. It must fit."""
        self._slots.fill(batch.slots)
        if self._chunks is None or batch.chunks is None:
            self._draft_slots.fill(batch.draft_slots)
            return
        self._chunks.fill(batch.chunks)
        # rounds, padded to the bucket, then the chunks that end a prompt
        drafting, num_rounds, bucket = self._draft_slots.tensor, batch.num_requests, self._bucket
        drafting[:] = self._padding_slot
        drafting[:num_rounds] = batch.draft_slots[:num_rounds]
        drafting[bucket : bucket + batch.chunks.num_finals] = batch.draft_slots[num_rounds:]
