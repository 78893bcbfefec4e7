"""The ragged shapes of one forward pass, defined here and nowhere else.

The rows of a pass are first the rows of a `DecodeBatch` (requests in a round: the same number of rows each), then those
of a `PrefillBatch` (prompt chunks: any number of rows). Either may be absent. `row_positions`, `slot_mapping` and the
backends follow that order.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor


class Mode(Enum):
    """What a pass computes; a backend is chosen per mode."""

    PREFILL = "prefill"  # prompt chunks, causal
    DECODE = "decode"  # one row per request
    VERIFY = "verify"  # the rows of a tree
    DRAFT_EXTEND = "draft_extend"  # the rows of an accepted path, causal
    DRAFT_DECODE = "draft_decode"  # one level of the draft tree; each row sees its own branch


@dataclass(frozen=True)
class DecodeBatch:
    """B requests of R rows each. Every row sees the request's first `prefix_len` KV positions, and of the `tail`
    positions behind them those whose bits are set in its mask; row r itself writes position
    prefix_len + tail - R + r, so the rows of one pass are the last R columns of the tail.

    prefix_len: [B] int32. mask: [B, R] int64, bit j is tail column j. page_table: [B, max_pages] int32.
    max_kv_len: host-side bound of prefix_len + tail over the batch. mask_words: the mask once more, in the backend's
    own `verify_buffer`, if it has one and it has been filled. chain: the host knows that row r sees columns 0 .. r of
    the tail, which are as many as rows, so that masks need not be read.
    """

    mode: Mode
    rows: int
    suffix_len: int
    prefix_len: Tensor
    mask: Tensor
    page_table: Tensor
    max_kv_len: int
    mask_words: Tensor | None = None
    chain: bool = False

    @property
    def num_requests(self) -> int:
        return self.prefix_len.shape[0]

    @property
    def num_rows(self) -> int:
        return self.num_requests * self.rows

    def kv_positions(self) -> Tensor:
        """[B, R] int64: the KV position that each row writes."""
        own = torch.arange(self.suffix_len - self.rows, self.suffix_len, device=self.prefix_len.device)
        return self.prefix_len.long().unsqueeze(1) + own


@dataclass(frozen=True)
class PrefillBatch:
    """C prompt chunks. Chunk c holds rows qo_indptr[c] .. qo_indptr[c + 1] - 1 (counted from the first chunk row) at
    positions starts[c] onwards, and each sees all earlier positions of its request and itself.

    Lengths come from the plan and live on the host; page_table: [C, max_pages] int32 on the device.
    """

    qo_indptr: tuple[int, ...]
    starts: tuple[int, ...]
    page_table: Tensor

    @property
    def num_chunks(self) -> int:
        return len(self.starts)

    @property
    def num_rows(self) -> int:
        return self.qo_indptr[-1]

    def kv_positions(self) -> Tensor:
        """[num_rows] int64: the KV position that each row writes."""
        counts = [end - first for first, end in pairwise(self.qo_indptr)]
        spans = [torch.arange(start, start + n) for start, n in zip(self.starts, counts, strict=True)]
        return to_device(torch.cat(spans), self.page_table.device)

    @cached_property
    def last_row_indices(self) -> Tensor:
        """[C] int64: each chunk's last row, counted from the first chunk row."""
        return to_device(torch.tensor(self.qo_indptr[1:]) - 1, self.page_table.device)

    def last_rows(self) -> "PrefillBatch":
        """Each chunk's last row alone."""
        ends = [start + end - first for start, (first, end) in zip(self.starts, pairwise(self.qo_indptr), strict=True)]
        return PrefillBatch(tuple(range(len(ends) + 1)), tuple(end - 1 for end in ends), self.page_table)

    def row_chunks(self) -> Tensor:
        """[num_rows] int64: which chunk each row belongs to."""
        counts = torch.tensor([end - first for first, end in pairwise(self.qo_indptr)])
        chunks = torch.repeat_interleave(torch.arange(self.num_chunks), counts)
        return to_device(chunks, self.page_table.device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """`host` on `device`, without waiting for it: through pinned memory, which torch's cache reuses only once the copy
    is done. On a CPU the tensor itself."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def causal_mask(num_requests: int, rows: int, device: torch.device) -> Tensor:
    """[num_requests, rows] int64: row r sees tail columns 0..r; a view without own memory per request."""
    row = torch.arange(1, rows + 1, device=device)
    return ((torch.ones_like(row) << row) - 1).expand(num_requests, rows)


def token_indices(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """[B, N] int64: the pool's token indices of positions [B, N] int64 of requests with page_table [B, max_pages]."""
    pages = page_table.gather(1, positions // page_size).long()
    return pages * page_size + positions % page_size


def decode_slot_mapping(batch: DecodeBatch, page_size: int) -> Tensor:
    """[B * R] int64: the pool's token index that each row of `batch` writes."""
    return token_indices(batch.page_table, batch.kv_positions(), page_size).flatten()


def prefill_slot_mapping(batch: PrefillBatch, page_size: int) -> Tensor:
    """[num_rows] int64: the pool's token index that each row of `batch` writes."""
    positions = batch.kv_positions()
    pages = batch.page_table[batch.row_chunks(), positions // page_size].long()
    return pages * page_size + positions % page_size
