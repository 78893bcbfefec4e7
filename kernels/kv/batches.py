"""The batches of a forward pass, and views of one layer's KV for backends and kernels: one type per layout
(`aerie.attention.kv_cache.layout`).

A pass has the rows of a `DecodeBatch` (requests in a round, the same number of rows each), then those of a
`PrefillBatch` (prompt chunks, any number of rows). Either may be absent. `row_positions`, `slot_mapping` and backends
use that order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from aerie.kernels.capability import ALIGNED_BYTES, Capability
from aerie.kernels.kv.mask_bits import MASK_BITS
from aerie.kernels.kv.stored_values import FP8
from aerie.kernels.to_device import to_device

_ALIGNMENT = ALIGNED_BYTES // 4  # int32 values


class Mode(Enum):
    """The kind of a pass; each mode has a backend."""

    PREFILL = "prefill"  # prompt chunks, causal
    DECODE = "decode"  # one row per request
    VERIFY = "verify"  # the rows of a tree
    DRAFT_EXTEND = "draft_extend"  # the rows of an accepted path, causal
    DRAFT_DECODE = "draft_decode"  # one level of the draft tree; each row sees its own branch


@dataclass(frozen=True)
class DecodeBatch:
    """B requests of R rows each. Every row sees the request's first `prefix_len` KV positions (the prefix), and of the
    next `suffix_len` positions (the suffix) those whose bits are set in its mask. Row r writes position prefix_len +
    suffix_len - R + r, so the rows of a pass are the last R columns of the suffix.

    mode: what the pass computes.
    rows: R.
    suffix_len: columns after the prefix, at least R and at most 63; or R for the nodes of a wider tree.
    prefix_len: [B] int32.
    mask: [B, R] int64, bit j is suffix column j; spans for more than 63 columns (`aerie.kernels.kv.tree_masks`).
    page_table: [B, max_pages] int32.
    max_kv_len: host-side bound of prefix_len + suffix_len over the batch.
    mask_words: the mask in the backend's own `tree_mask_buffer`, if it has one and the buffer has been filled.
    chain: whether suffix_len is R and row r sees columns 0 .. r, so that masks need not be read.
    slots: [B] int64, slots whose states recurrent layers read and write; None for models without such layers.
    window: maximum tokens that a row sees, in all layers: the last ones of its path, including itself. None: no limit.
        The window of a single layer is in its `ScoreRule`.
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
        """Whether each row is known to see all positions up to its own, so that masks need not be read. A single row
        sees all of its suffix."""
        return self.rows == 1 or self.chain or self.mode is Mode.DRAFT_EXTEND

    def for_window(self, window: int | None) -> "DecodeBatch":
        """Return this batch for a layer in which rows see at most `window` tokens; None: no limit of its own."""
        narrowed = narrower(self.window, window)
        return self if narrowed == self.window else replace(self, window=narrowed)

    @property
    def num_requests(self) -> int:
        return self.prefix_len.shape[0]

    @property
    def num_rows(self) -> int:
        return self.num_requests * self.rows

    def kv_positions(self) -> Tensor:
        """Return [B, R] int64: the KV position that each row writes."""
        own = torch.arange(self.suffix_len - self.rows, self.suffix_len, device=self.prefix_len.device)
        return self.prefix_len.long().unsqueeze(1) + own


@dataclass(frozen=True)
class ChunkLists:
    """Prompt chunks on the host: where each starts in its prompt, and its number of rows."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def num_attended(self) -> tuple[int, ...]:
        """Return the number of tokens that each chunk attends to, including its own; 0 without rows."""
        return tuple(start + n if n else 0 for start, n in zip(self.starts, self.counts, strict=True))


@dataclass(frozen=True)
class RowInputs:
    """Inputs of chunk rows besides token ids.

    rows: [n] int64, rows whose embeddings are given, counted from the first chunk row; None for none.
    embeddings: [n, hidden_size] float32; None without `rows`.
    positions: [rows of the chunks] int64 rotary positions, or [3, rows of the chunks] of M-RoPE; None: the KV
        positions.
    image_rows: [m] int64, rows of images, counted from the first chunk row; None for none.
    image_values: [m, n * hidden_size], their embeddings, then what is added to the residual stream after the first
        n - 1 layers (DeepStack); None without images.
    image_mask: [rows of the chunks] bool, whether a row is an image's, instead of `image_rows`: then `image_values` has
        a row for each chunk row, arbitrary for others. Its shape does not depend on the images, so that a captured
        step can read it.
    reach: [rows of the chunks] int32, the last position that each row sees in layers whose `ScoreRule` is
        `within_images`: its own, or that of its image's last row, which is in the same chunk. None: its own.
    """

    rows: Tensor | None
    embeddings: Tensor | None
    positions: Tensor | None
    image_rows: Tensor | None = None
    image_values: Tensor | None = None
    reach: Tensor | None = None
    image_mask: Tensor | None = None

    @property
    def is_captured(self) -> bool:
        """Whether captured steps of models with M-RoPE have such inputs."""
        return self.rows is None and self.reach is None


@dataclass(frozen=True)
class PrefillBatch:
    """C prompt chunks, described by device tensors of fixed sizes, so that a captured step can read them. Chunk c has
    rows qo_indptr[c] .. qo_indptr[c + 1] - 1 (counted from the first chunk row) at positions starts[c] onwards. Each
    row sees itself and all earlier positions of its request.

    Padding: a chunk without rows has the dummy page in its page table. Rows from qo_indptr[C] on belong to no chunk and
    write to page 0; their attention is zero.

    qo_indptr: [C + 1] int32.
    starts: [C] int32.
    page_table: [C, max_pages] int32.
    num_rows: rows of the pass's tensors, including padding.
    lists: the chunks on the host, which saves device syncs; None if only the device knows them.
    window: maximum tokens that a row sees, in all layers, as in `DecodeBatch`; None: no limit.
    seen_limit: bound on the total number of tokens that chunks attend to, if only the device knows the chunks; None:
        unknown.
    store_from: [C] int32, first position of each chunk whose KV is stored. Earlier rows only advance the state of
        recurrent layers: their KV is already in shared pages, so they write to page 0. None: the KV of all rows is
        stored.
    slots: [C] int64, arbitrary for chunks without rows; None in captured steps of models without recurrent layers and
        without a `RowIndex`.
    saved_at: [C] int32, position after which a chunk's state is saved; -1: not saved. None: none is saved.
    saved_row: [C] int64, row of the state pool to which it is saved.
    inputs: inputs of some rows besides their ids; None for most steps.
    """

    qo_indptr: Tensor
    starts: Tensor
    page_table: Tensor
    num_rows: int
    lists: ChunkLists | None
    window: int | None = None
    seen_limit: int | None = None
    store_from: Tensor | None = None
    slots: Tensor | None = None
    saved_at: Tensor | None = None
    saved_row: Tensor | None = None
    inputs: RowInputs | None = None

    @staticmethod
    def from_lists(
        starts: Sequence[int], counts: Sequence[int], page_table: Tensor, num_rows: int | None = None
    ) -> "PrefillBatch":
        """Return chunks of counts[c] rows at positions starts[c] onwards, on the device of page_table [C, max_pages]
        int32.

        Further rows of page_table become chunks without rows. num_rows: None for no padding rows. Makes one
        asynchronous copy to the device.
        """
        num_chunks, padding = page_table.shape[0], page_table.shape[0] - len(starts)
        assert padding >= 0 and len(starts) == len(counts)
        lists = ChunkLists((*starts, *[0] * padding), (*counts, *[0] * padding))
        begin = -(-(num_chunks + 1) // _ALIGNMENT) * _ALIGNMENT
        host = torch.zeros(begin + num_chunks, dtype=torch.int32)
        host[1 : num_chunks + 1] = torch.tensor(lists.counts, dtype=torch.int32).cumsum(0)
        host[begin:] = torch.tensor(lists.starts, dtype=torch.int32)
        used = sum(counts)
        assert num_rows is None or num_rows >= used
        packed = to_device(host, page_table.device)
        return PrefillBatch(packed[: num_chunks + 1], packed[begin:], page_table, num_rows or used, lists)

    def for_window(self, window: int | None) -> "PrefillBatch":
        """Return this batch for a layer in which rows see at most `window` tokens; None: no limit of its own."""
        narrowed = narrower(self.window, window)
        return self if narrowed == self.window else replace(self, window=narrowed)

    def reach(self, within_images: bool) -> Tensor | None:
        """Return `RowInputs.reach` for layers whose rule is `within_images`."""
        return self.inputs.reach if within_images and self.inputs is not None else None

    @property
    def num_chunks(self) -> int:
        """Number of chunks, including those without rows."""
        return self.page_table.shape[0]

    @property
    def host_lists(self) -> ChunkLists:
        """Return `lists`; on a CPU, read from the tensors if it is None."""
        if self.lists is not None:
            return self.lists
        on_host = Capability.of(self.qo_indptr.device).shares_host_memory
        assert on_host, "a captured step's chunks are known to the device only"
        return ChunkLists(tuple(self.starts.tolist()), tuple(self.qo_indptr.diff().tolist()))

    @property
    def is_padded(self) -> bool:
        """Return whether some rows may belong to no chunk."""
        return self.lists is None or sum(self.lists.counts) < self.num_rows

    def row_chunks(self) -> Tensor:
        """Return [num_rows] int64: the chunk of each row; C for padding rows."""
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self.qo_indptr.device)
        return torch.searchsorted(self.qo_indptr[1:], rows, right=True)

    @cached_property
    def last_row_indices(self) -> Tensor:
        """Return [C] int64: each chunk's last row, counted from the first chunk row; arbitrary for a chunk without
        rows."""
        return (self.qo_indptr[1:].long() - 1).clamp_min(0)

    def last_rows(self) -> "PrefillBatch":
        """Return a batch of each chunk's last row; for a chunk without rows, a row on the dummy page."""
        count = self.qo_indptr[1:] - self.qo_indptr[:-1]
        steps = torch.arange(self.num_chunks + 1, dtype=torch.int32, device=self.qo_indptr.device)
        lists = None
        if self.lists is not None:
            ends = [max(start + n - 1, 0) for start, n in zip(self.lists.starts, self.lists.counts, strict=True)]
            lists = ChunkLists(tuple(ends), (1,) * len(ends))
        last = (self.starts + count - 1).clamp_min(0)
        return PrefillBatch(steps, last, self.page_table, self.num_chunks, lists, self.window)


def narrower(one: int | None, other: int | None) -> int | None:
    """Return the smaller of two windows."""
    return min((window for window in (one, other) if window is not None), default=None)


def newest_columns(mask: Tensor, suffix_len: int, count: int) -> Tensor:
    """Return mask [B, R] int64, of `suffix_len` columns, with only the newest `count` set bits of each row."""
    if suffix_len > MASK_BITS:
        raise ValueError(
            f"a window of {count} tokens is shorter than a tree of {suffix_len} nodes; set num_draft_tokens to at most "
            f"{max(count, MASK_BITS)}"
        )
    column = torch.arange(suffix_len, device=mask.device)
    seen = (mask.unsqueeze(2) >> column) & 1
    newest = seen.flip(2).cumsum(2).flip(2) <= count
    return ((seen & newest) << column).sum(2)


def causal_mask(num_requests: int, rows: int, device: torch.device) -> Tensor:
    """Return [num_requests, rows] int64, expanded over requests: row r sees suffix columns 0..r."""
    row = torch.arange(1, rows + 1, device=device)
    return ((torch.ones_like(row) << row) - 1).expand(num_requests, rows)


def token_indices(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Return [B, N] int64: the pool's token indices of positions [B, N] int64 in requests with page_table [B,
    max_pages]."""
    pages = page_table.gather(1, positions // page_size).long()
    return pages * page_size + positions % page_size


@dataclass(frozen=True)
class LayerKV:
    """Backends' view of a layer with keys and values per head.

    k, v: [num_pages + 1, page_size, kv_heads, head_dim], contiguous; padding rows write to page 0.
    k_scale, v_scale: factors on the stored numbers; 1 unless they are FP8 (`aerie.kernels.kv.stored_values`).
    """

    k: Tensor
    v: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """Keys and values as kernels read them: FP8 as pairs of numbers, int16."""
        return (self.k.view(torch.int16), self.v.view(torch.int16)) if self.k.dtype == FP8 else (self.k, self.v)


@dataclass(frozen=True)
class LatentKV:
    """Backends' view of a layer with latent rows.

    rows: [num_pages + 1, page_size, latent + rotated], contiguous; the keys of q [rows, q_heads, latent + rotated].
    latent: number of leading dimensions that are also the value; `forward` returns their weighted sums [rows, q_heads,
        latent].
    scale: factor on the stored numbers; 1 unless they are FP8 (`aerie.kernels.kv.stored_values`).
    """

    rows: Tensor
    latent: int
    scale: float = 1.0


@dataclass(frozen=True)
class ExpandedKV:
    """Keys and values expanded from latent rows, for all tokens that the chunks attend to, chunk by chunk.

    kv: [tokens, heads, key_dim + value_dim], contiguous.
    k_pe: [tokens, rotated], the rotated part of keys, which heads share; last stride 1.
    first: [C] int32, each chunk's first token.
    """

    kv: Tensor
    k_pe: Tensor
    first: Tensor
    key_dim: int
