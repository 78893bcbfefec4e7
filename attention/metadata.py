"""The batches of a forward pass, defined only here.

A pass has the rows of a `DecodeBatch` (requests in a round, the same number of rows each), then those of a
`PrefillBatch`
(prompt chunks, any number of rows). Either may be absent. `row_positions`, `slot_mapping` and backends use that order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from attention.capability import Capability
from attention.to_device import to_device

ALIGNMENT = 4  # int32 values in a packed tensor: kernels are compiled for addresses that are multiples of 16


class Mode(Enum):
    """The kind of a pass; each mode has a backend."""

    PREFILL = "prefill"  # prompt chunks, causal
    DECODE = "decode"  # one row per request
    VERIFY = "verify"  # the rows of a tree
    DRAFT_EXTEND = "draft_extend"  # the rows of an accepted path, causal
    DRAFT_DECODE = "draft_decode"  # one level of the draft tree; each row sees its own branch


@dataclass(frozen=True)
class DecodeBatch:
    """B requests of R rows each. Every row sees the request's first `prefix_len` KV positions, and of the `suffix_len`
    positions after them those whose bits are set in its mask; row r itself writes position
    prefix_len + suffix_len - R + r, so the rows of one pass are the last R columns of the suffix.

    mode: what the pass computes.
    rows: R.
    suffix_len: columns after the prefix, at least R and at most 63.
    prefix_len: [B] int32.
    mask: [B, R] int64, bit j is suffix column j.
    page_table: [B, max_pages] int32.
    max_kv_len: host-side bound of prefix_len + suffix_len over the batch.
    mask_words: the mask once more, in the backend's own `verify_buffer`, if it has one and it has been filled.
    chain: the host knows that row r sees columns 0 .. r of the suffix, which are as many as rows, so that masks need
        not be read.
    slots: [B] int64, whose states recurrent layers read and write; None for models without.
    window: tokens that a row sees at most, the last of its own path and itself among them: of the prefix it sees as
        many fewer as it sees columns of the suffix. None for all. Of all layers; one layer's is in its `ScoreRule`.
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
    window: int | None = None
    slots: Tensor | None = None

    @property
    def is_causal(self) -> bool:
        """Whether the host knows, without masks, that each row sees all positions up to its own. A single row sees all
        of its suffix."""
        return self.rows == 1 or self.chain or self.mode is Mode.DRAFT_EXTEND

    def through(self, window: int | None) -> "DecodeBatch":
        """This batch as a layer with `window` sees it."""
        narrowed = narrower(self.window, window)
        return self if narrowed == self.window else replace(self, window=narrowed)

    @property
    def num_requests(self) -> int:
        return self.prefix_len.shape[0]

    @property
    def num_rows(self) -> int:
        return self.num_requests * self.rows

    def kv_positions(self) -> Tensor:
        """[B, R] int64: KV position that each row writes."""
        own = torch.arange(self.suffix_len - self.rows, self.suffix_len, device=self.prefix_len.device)
        return self.prefix_len.long().unsqueeze(1) + own


@dataclass(frozen=True)
class ChunkLists:
    """Prompt chunks on the host: where each starts in its prompt, and its number of rows."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def seen(self) -> tuple[int, ...]:
        """Tokens that each chunk attends to, its own included; 0 without rows."""
        return tuple(start + n if n else 0 for start, n in zip(self.starts, self.counts, strict=True))


@dataclass(frozen=True)
class PrefillBatch:
    """C prompt chunks, described on the device, in tensors whose sizes a captured step can fix. Chunk c holds rows
    qo_indptr[c] .. qo_indptr[c + 1] - 1 (counted from the first chunk row) at positions starts[c] onwards, and each
    sees all earlier positions of its request and itself.

    Padding: a chunk may have no rows, and its page table is then the dummy page's; rows from qo_indptr[C] on belong to
    no chunk, write to page 0, and attention gives them zeros.

    qo_indptr: [C + 1] int32.
    starts: [C] int32.
    page_table: [C, max_pages] int32.
    num_rows: of the pass's tensors, padding included.
    lists: the same on the host, None where only the device knows. With it nothing waits for the device.
    window: tokens that a row sees at most, the last before it and itself; None for all. Of all layers, as in
        `DecodeBatch`.
    seen_limit: tokens that all chunks look at together at most, where only the device knows the chunks and the host
        knows that.
    kept_from: [C] int32, the first position of each chunk whose KV is kept. Earlier rows run for the state of recurrent
        layers alone: their KV is in shared pages already, and they write to page 0. None: all rows keep theirs.
    slots: [C] int64, whose states recurrent layers read and write, any for a chunk without rows; None for models
        without.
    saved_at: [C] int32, the position after which a chunk's state is saved, -1 for none; None for no chunk.
    saved_row: [C] int64, the row of the state pool that it is saved to.
    """

    qo_indptr: Tensor
    starts: Tensor
    page_table: Tensor
    num_rows: int
    lists: ChunkLists | None
    window: int | None = None
    seen_limit: int | None = None
    kept_from: Tensor | None = None
    slots: Tensor | None = None
    saved_at: Tensor | None = None
    saved_row: Tensor | None = None

    @staticmethod
    def from_lists(
        starts: Sequence[int], counts: Sequence[int], page_table: Tensor, num_rows: int | None = None
    ) -> "PrefillBatch":
        """Chunks of counts[c] rows at positions starts[c] onwards, on the device of page_table [C, max_pages] int32.

        Where page_table has more rows than there are chunks, the rest are chunks without rows. num_rows: None for no
        padding rows. One copy to the device, for which nothing waits.
        """
        num_chunks, padding = page_table.shape[0], page_table.shape[0] - len(starts)
        assert padding >= 0 and len(starts) == len(counts)
        lists = ChunkLists((*starts, *[0] * padding), (*counts, *[0] * padding))
        begin = -(-(num_chunks + 1) // ALIGNMENT) * ALIGNMENT
        host = torch.zeros(begin + num_chunks, dtype=torch.int32)
        host[1 : num_chunks + 1] = torch.tensor(lists.counts, dtype=torch.int32).cumsum(0)
        host[begin:] = torch.tensor(lists.starts, dtype=torch.int32)
        used = sum(counts)
        assert num_rows is None or num_rows >= used
        packed = to_device(host, page_table.device)
        return PrefillBatch(packed[: num_chunks + 1], packed[begin:], page_table, num_rows or used, lists)

    def through(self, window: int | None) -> "PrefillBatch":
        """This batch as a layer with `window` sees it."""
        narrowed = narrower(self.window, window)
        return self if narrowed == self.window else replace(self, window=narrowed)

    @property
    def num_chunks(self) -> int:
        """Chunks without rows included."""
        return self.page_table.shape[0]

    @property
    def known(self) -> ChunkLists:
        """`lists`; on a CPU they are read if there are none."""
        if self.lists is not None:
            return self.lists
        on_host = Capability.of(self.qo_indptr.device).shares_host_memory
        assert on_host, "a captured step's chunks are known to the device only"
        return ChunkLists(tuple(self.starts.tolist()), tuple(self.qo_indptr.diff().tolist()))

    @property
    def is_padded(self) -> bool:
        """Whether there may be rows that belong to no chunk."""
        return self.lists is None or sum(self.lists.counts) < self.num_rows

    def row_chunks(self) -> Tensor:
        """[num_rows] int64: which chunk each row belongs to; C for padding rows."""
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self.qo_indptr.device)
        return torch.searchsorted(self.qo_indptr[1:], rows, right=True)

    @cached_property
    def last_row_indices(self) -> Tensor:
        """[C] int64: each chunk's last row, counted from the first chunk row; any row for a chunk without."""
        return (self.qo_indptr[1:].long() - 1).clamp_min(0)

    def last_rows(self) -> "PrefillBatch":
        """Each chunk's last row alone; for a chunk without rows one on the dummy page."""
        count = self.qo_indptr[1:] - self.qo_indptr[:-1]
        steps = torch.arange(self.num_chunks + 1, dtype=torch.int32, device=self.qo_indptr.device)
        lists = None
        if self.lists is not None:
            ends = [max(start + n - 1, 0) for start, n in zip(self.lists.starts, self.lists.counts, strict=True)]
            lists = ChunkLists(tuple(ends), (1,) * len(ends))
        last = (self.starts + count - 1).clamp_min(0)
        return PrefillBatch(steps, last, self.page_table, self.num_chunks, lists, self.window)


def narrower(one: int | None, other: int | None) -> int | None:
    """The smaller of two windows."""
    return min((each for each in (one, other) if each is not None), default=None)


def newest_columns(mask: Tensor, suffix_len: int, count: int) -> Tensor:
    """Keep the newest `count` seen columns of each row of mask [B, R] int64, of `suffix_len` columns."""
    column = torch.arange(suffix_len, device=mask.device)
    seen = (mask.unsqueeze(2) >> column) & 1
    newest = seen.flip(2).cumsum(2).flip(2) <= count
    return ((seen & newest) << column).sum(2)


def causal_mask(num_requests: int, rows: int, device: torch.device) -> Tensor:
    """[num_requests, rows] int64: row r sees suffix columns 0..r; a view without own memory per request."""
    row = torch.arange(1, rows + 1, device=device)
    return ((torch.ones_like(row) << row) - 1).expand(num_requests, rows)


def token_indices(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """[B, N] int64: the pool's token indices of positions [B, N] int64 of requests with page_table [B, max_pages]."""
    pages = page_table.gather(1, positions // page_size).long()
    return pages * page_size + positions % page_size
