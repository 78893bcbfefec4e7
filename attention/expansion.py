"""Prompt chunks over latent rows in their expanded form: instead of multiplying every head's queries into the latent
space, which makes each pair of a row and a token three times as dear, keys and values are made by heads again, once for
all tokens that the chunks look at. That pays where a token is looked at by many rows.

Memory for that must be there before the chunks are known: a captured step has room for so many tokens, and runs if its
chunks look at no more. The device reads how many tokens that is, and makes keys and values of those alone.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.metadata import ChunkLists, PrefillBatch
from attention.ops.slot_mapping import map_rows
from attention.views import ExpandedKV

MAX_TOKENS = 8  # by rows of the pass: keys and values are made of no more, which bounds their memory
# Pairs of a row and a token that cost absorbed as much more as making one token's keys and values: latent x (key +
# value) by (2 x latent - key - value), of DeepSeek's sizes.
_PAIRS_OF_TOKEN = 170


@dataclass(frozen=True)
class ExpandedChunks(ABC):
    """One batch of chunks, to be attended layer by layer. tile_lists: the backend's, by the size of a tile."""

    batch: PrefillBatch
    page_size: int
    tile_lists: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: PrefillBatch, page_size: int) -> "ExpandedChunks | None":
        """None where that does not pay, or nobody knows how many tokens the chunks look at."""
        expands = batch.seen_limit is not None if batch.lists is None else pays(batch.lists)
        return cls(batch, page_size) if expands and batch.window is None else None

    @cached_property
    def _whole(self) -> PrefillBatch:
        """Of each request all that its chunk looks at."""
        batch = self.batch
        if batch.lists is not None:
            return PrefillBatch.from_lists([0] * batch.num_chunks, batch.lists.seen, batch.page_table)
        assert batch.seen_limit is not None
        counts = batch.qo_indptr.diff()
        seen = torch.where(counts > 0, batch.starts + counts, 0)
        indptr = F.pad(seen.cumsum(0, dtype=torch.int32), (1, 0))
        return PrefillBatch(indptr, torch.zeros_like(seen), batch.page_table, batch.seen_limit, lists=None)

    @cached_property
    def tokens(self) -> Tensor:
        """[tokens] int64, token indices of the pool: the first chunk's, then the next one's, then the dummy page's."""
        return map_rows(self._whole, self.page_size)[1]

    @property
    def ends(self) -> Tensor:
        """[C + 1] int32: 0, and where each chunk's tokens end; the last is how many there are."""
        return self._whole.qo_indptr

    @property
    def first(self) -> Tensor:
        """[C] int32: where each chunk's tokens begin."""
        return self.ends[:-1]

    @abstractmethod
    def attend(
        self, q: Tensor, made: ExpandedKV, cos: Tensor, sin: Tensor, index: Tensor, scale: float, out: Tensor
    ) -> Tensor:
        """Write causal attention of one layer's rows into `out` and return it; zeros in rows that belong to no chunk.

        q         [rows, heads, key_dim + rotated], its rotated part not rotated yet
        made      keys and values of `tokens`
        cos, sin  [any, rotated / 2] float32
        index     [rows] int64, each row's line of cos and sin
        scale     positive
        out       [rows, heads, value_dim], written
        """


def pays(lists: ChunkLists) -> bool:
    """Whether these chunks cost less expanded, and no more memory than they may."""
    tokens, rows = sum(lists.seen), sum(lists.counts)
    pairs = sum(n * start + n * n // 2 for start, n in zip(lists.starts, lists.counts, strict=True))
    return 0 < tokens <= min(MAX_TOKENS * rows, rows + pairs // _PAIRS_OF_TOKEN)
