"""Prompt chunks over latent rows in expanded form.

In absorbed form, every head's queries are projected to the latent space, and each pair of a row and a token costs three
times as much. In expanded form, keys and values per head are computed once for all tokens that the chunks attend to.
That is faster if many rows attend to each token.

Memory is allocated before the chunks are known. So a captured step has room for a fixed number of tokens, and runs if
its chunks attend to no more. The device reads the actual number, and expands only those.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.kv.batches import ChunkLists, ExpandedKV, PrefillBatch
from aerie.kernels.kv.slot_mapping import map_rows
from aerie.kernels.rope.rope_store import Angles

MAX_TOKENS = 8  # maximum expanded tokens per row of the pass, which bounds memory
# Rows per token at which the extra cost of absorbed form equals that of expanding the token: latent x (key + value) /
# (2 x latent - key - value), for DeepSeek's sizes.
_PAIRS_OF_TOKEN = 170


@dataclass(frozen=True)
class ExpandedChunks(ABC):
    """One batch of chunks for all layers. tile_lists: the backend's, by tile size."""

    batch: PrefillBatch
    page_size: int
    tile_lists: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: PrefillBatch, page_size: int) -> "ExpandedChunks | None":
        """Return None if expansion is not faster, or if the host does not know the number of tokens."""
        expands = batch.seen_limit is not None if batch.lists is None else pays(batch.lists)
        return cls(batch, page_size) if expands and batch.window is None else None

    @cached_property
    def _whole(self) -> PrefillBatch:
        """Return all tokens that each request's chunk attends to."""
        batch = self.batch
        if batch.lists is not None:
            return PrefillBatch.from_lists([0] * batch.num_chunks, batch.lists.num_attended, batch.page_table)
        assert batch.seen_limit is not None
        counts = batch.qo_indptr.diff()
        seen = torch.where(counts > 0, batch.starts + counts, 0)
        indptr = F.pad(seen.cumsum(0, dtype=torch.int32), (1, 0))
        return PrefillBatch(indptr, torch.zeros_like(seen), batch.page_table, batch.seen_limit, lists=None)

    @cached_property
    def tokens(self) -> Tensor:
        """Return [tokens] int64 token indices of the pool, chunk by chunk, then those of the dummy page."""
        return map_rows(self._whole, self.page_size)[1]

    @cached_property
    def token_chunks(self) -> Tensor:
        """Return [tokens] int64: the chunk of each token; any for those of the dummy page."""
        return self._whole.row_chunks().clamp_max(self._whole.num_chunks - 1)

    @property
    def ends(self) -> Tensor:
        """Return [C + 1] int32: 0, then the end of each chunk's tokens."""
        return self._whole.qo_indptr

    @property
    def first(self) -> Tensor:
        """Return [C] int32: start of each chunk's tokens."""
        return self.ends[:-1]

    @abstractmethod
    def attend(self, q: Tensor, made: ExpandedKV, angles: Angles, scale: float, out: Tensor) -> Tensor:
        """Write causal attention of one layer's rows to `out` and return it; zeros for rows without a chunk.

        q         [rows, heads, key_dim + rotated], before RoPE
        made      keys and values of `tokens`
        angles    of the rows
        scale     positive
        out       [rows, heads, value_dim], written
        """


def pays(lists: ChunkLists) -> bool:
    """Return whether expanded form is faster for these chunks and fits in the memory limit."""
    tokens, rows = sum(lists.num_attended), sum(lists.counts)
    pairs = sum(n * start + n * n // 2 for start, n in zip(lists.starts, lists.counts, strict=True))
    return 0 < tokens <= min(MAX_TOKENS * rows, rows + pairs // _PAIRS_OF_TOKEN)
