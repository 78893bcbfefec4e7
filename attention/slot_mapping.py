"""Where the rows of a pass write: by a kernel on GPUs, else in torch. Called once a pass by the forward context."""

from torch import Tensor

from attention.metadata import DecodeBatch, PrefillBatch, decode_places, prefill_places


def row_places(batch: DecodeBatch | PrefillBatch, page_size: int) -> tuple[Tensor, Tensor]:
    """KV positions, and the pool's token indices, that the rows of `batch` write: [rows] int64 each. Nothing of the
    batch is read on the host."""
    if batch.page_table.is_cuda:
        from attention.ops import slot_mapping_triton

        if isinstance(batch, DecodeBatch):
            return slot_mapping_triton.decode_places(batch, page_size)
        return slot_mapping_triton.prefill_places(batch, page_size)
    return decode_places(batch, page_size) if isinstance(batch, DecodeBatch) else prefill_places(batch, page_size)
