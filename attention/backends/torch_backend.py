"""Attention in plain PyTorch: the reference for tests of other backends, and the backend for CPUs, where
`aerie.kernels.attend.rounds_cpp` computes rounds of float32 heads without sinks and soft caps.

A row's result does not depend on the tokens or lengths of other requests in the pass: positions after a request's own
length are masked to minus infinity, and contribute exact zeros. In PyTorch, its last bits may depend on the number of
requests and the bound on their lengths, because the BLAS library may choose kernels by these.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.attention.backend import AttentionBackend, Prepared, check_inputs
from aerie.kernels.attend import rounds_cpp
from aerie.kernels.attend.scores import ScoreRule, row_weights
from aerie.kernels.kv.batches import DecodeBatch, LatentKV, LayerKV, PrefillBatch, newest_columns
from aerie.kernels.kv.mask_bits import MASK_BITS
from aerie.kernels.kv.stored_values import read_pages
from aerie.kernels.kv.tree_masks import seen_columns


class TorchBackend(AttentionBackend):
    name = "torch"

    def prepare(self, batch: DecodeBatch | PrefillBatch) -> Prepared:
        return _PreparedDecode(batch, {}) if isinstance(batch, DecodeBatch) else _PreparedPrefill(batch)


@dataclass(frozen=True)
class _PreparedDecode(Prepared):
    """A pass of rounds.

    hidden_of: by page size and window, [B, 1, 1, R, length] bool: True where a row must not attend, for the positions
        of the pages from `_pages_seen`.
    """

    batch: DecodeBatch
    hidden_of: dict[tuple[int, int | None], Tensor]

    @property
    def host_batch(self) -> DecodeBatch | None:
        return self.batch if self.batch.window is None else None

    def forward(self, q: Tensor, kv: LayerKV | LatentKV, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        """Return the attention of all rows. Computes every position of the pages that a row sees, and masks the hidden
        ones."""
        check_inputs(q, kv, self.batch, rule, sinks)
        batch = self.batch.for_window(rule.window)
        has_bits = batch.suffix_len <= MASK_BITS  # the C++ kernel reads no spans
        if has_bits and isinstance(kv, LayerKV) and rounds_cpp.serves(q, kv, rule, batch.window, batch.rows):
            return rounds_cpp.attend_rounds(q, kv, batch, rule.scale)
        page_size = page_size_of(kv)
        pages, first = _pages_seen(batch, page_size)
        length = pages.shape[1] * page_size
        k, v = _keys_and_values(kv, pages.flatten(), q.dtype)
        k_scale, v_scale = _scales(kv)
        num_kv_heads, head_dim = k.shape[1:]
        k, v = (x.view(batch.num_requests, length, num_kv_heads, -1) for x in (k, v))
        group = q.shape[1] // num_kv_heads
        # [B, kv_heads, group * R, head_dim]: rows that share a KV head form one matrix product
        rows = q.view(batch.num_requests, batch.rows, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        rows = rows.reshape(batch.num_requests, num_kv_heads, group * batch.rows, head_dim)
        scores = (rows * (rule.scale * k_scale)) @ k.permute(0, 2, 3, 1)
        scores = scores.view(batch.num_requests, num_kv_heads, group, batch.rows, length)
        sinks = None if sinks is None else sinks.view(num_kv_heads, group, 1, 1)
        weights = row_weights(scores, self._hidden(batch, page_size, first, length), rule, sinks).to(q.dtype)
        out = weights.view(batch.num_requests, num_kv_heads, group * batch.rows, length) @ v.permute(0, 2, 1, 3)
        out = out.view(batch.num_requests, num_kv_heads, group, batch.rows, -1).permute(0, 3, 1, 2, 4)
        out = out.reshape(batch.num_rows, q.shape[1], -1)
        return out if v_scale == 1.0 else out * v_scale

    def _hidden(self, batch: DecodeBatch, page_size: int, first: Tensor | None, length: int) -> Tensor:
        """Return `_hidden_positions`, computed once per pass for all layers with this window."""
        key = page_size, batch.window
        if key not in self.hidden_of:
            self.hidden_of[key] = _hidden_positions(batch, first, length)
        return self.hidden_of[key]


def _pages_seen(batch: DecodeBatch, page_size: int) -> tuple[Tensor, Tensor | None]:
    """Return pages [B, n] int64 that contain all positions that rows see, and the start position [B] int64 of the first
    one (None: 0). A shorter table repeats its last page, which is masked."""
    num_pages = -(-batch.max_kv_len // page_size)
    if batch.window is None:
        return batch.page_table[:, :num_pages].long(), None
    first = (batch.prefix_len.long() + 1 - batch.window).clamp_min(0) // page_size
    num_seen = min(num_pages, (batch.window + batch.suffix_len - 2) // page_size + 2)
    columns = first.unsqueeze(1) + torch.arange(num_seen, device=first.device)
    return batch.page_table.gather(1, columns.clamp_max(batch.page_table.shape[1] - 1)).long(), first * page_size


def _hidden_positions(batch: DecodeBatch, first: Tensor | None, length: int) -> Tensor:
    """Return [B, 1, 1, R, length] bool: True where a row must not attend.

    first: [B] position of the first column; None: 0.
    length: number of columns.

    Columns before `prefix_len` are the prefix, which all rows see. The next `suffix_len` are the tree, of which a row
    sees its path: bits or spans of `batch.mask`. A window counts backwards along the path, then in the prefix.
    """
    origin = batch.prefix_len.long() if first is None else batch.prefix_len.long() - first
    column = torch.arange(length, device=batch.mask.device) - origin.unsqueeze(1)
    in_suffix = (column >= 0) & (column < batch.suffix_len)
    mask = batch.mask
    if batch.window is not None and batch.window < batch.suffix_len:
        mask = newest_columns(mask, batch.suffix_len, batch.window)
    if batch.suffix_len > MASK_BITS:
        index = column.clamp(0, batch.suffix_len - 1).unsqueeze(1).expand(-1, batch.rows, -1)
        bits = seen_columns(mask, batch.suffix_len).gather(2, index)
    else:
        bits = (mask.unsqueeze(2) >> column.clamp(0, 62).unsqueeze(1)) & 1
    in_prefix = (column < 0).unsqueeze(1)
    if batch.window is not None:
        path = seen_columns(mask, batch.suffix_len).sum(2, keepdim=True)  # nodes of each row's path, itself included
        in_prefix = in_prefix & (column.unsqueeze(1) >= path - batch.window)
    seen = in_prefix | (in_suffix.unsqueeze(1) & bits.bool())
    return ~seen.view(batch.num_requests, 1, 1, batch.rows, length)


@dataclass(frozen=True)
class _PreparedPrefill(Prepared):
    """Prompt chunks of one pass, for the attention of every layer."""

    batch: PrefillBatch

    def forward(self, q: Tensor, kv: LayerKV | LatentKV, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
        """Return the attention of all rows, computed chunk by chunk; padding rows are zero."""
        check_inputs(q, kv, self.batch, rule, sinks)
        batch = self.batch.for_window(rule.window)
        value_dim = kv.latent if isinstance(kv, LatentKV) else kv.v.shape[-1]
        out = q.new_empty(*q.shape[:2], value_dim)
        chunks, reach, end = self.batch.host_lists, batch.reach(rule.within_images), 0
        for chunk, (start, count) in enumerate(zip(chunks.starts, chunks.counts, strict=True)):
            first, end = end, end + count
            if count:
                chunk_reach = None if reach is None else reach[first:end]
                out[first:end] = _attend_chunk(q[first:end], kv, batch, chunk, start, rule, sinks, chunk_reach)
        out[end:] = 0.0  # padding
        return out


def _attend_chunk(
    q: Tensor,
    kv: LayerKV | LatentKV,
    batch: PrefillBatch,
    chunk: int,
    start: int,
    rule: ScoreRule,
    sinks: Tensor | None,
    reach: Tensor | None,
) -> Tensor:
    """Return the attention of one chunk.

    q: [n, q_heads, head_dim] at positions start .. start + n - 1.
    chunk: its index in `batch`.
    reach: [n] int32, the last position that each row sees, see `RowInputs`; None: causal.
    """
    page_size, end = page_size_of(kv), start + q.shape[0]
    first = 0 if batch.window is None else max(start + 1 - batch.window, 0) // page_size
    k, v = _keys_and_values(kv, batch.page_table[chunk, first : -(-end // page_size)].long(), q.dtype)
    k_scale, v_scale = _scales(kv)
    first *= page_size
    length = end - first
    k, v = k[:length].transpose(0, 1), v[:length].transpose(0, 1)
    num_kv_heads, head_dim = k.shape[0], k.shape[2]
    group = q.shape[1] // num_kv_heads
    rows = q.view(q.shape[0], num_kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    scores = ((rows * (rule.scale * k_scale)) @ k.transpose(1, 2)).view(num_kv_heads, group, q.shape[0], length)
    position = torch.arange(length, device=q.device)
    own = position[start - first :].unsqueeze(1)
    hidden = position > (own if reach is None else reach.unsqueeze(1) - first)
    if batch.window is not None:
        hidden |= position <= own - batch.window
    sinks = None if sinks is None else sinks.view(num_kv_heads, group, 1, 1)
    weights = row_weights(scores, hidden, rule, sinks).to(q.dtype).view(num_kv_heads, -1, length)
    out = (weights @ v).view(num_kv_heads, group, q.shape[0], -1)
    out = out.permute(2, 0, 1, 3).reshape(*q.shape[:2], -1)
    return out if v_scale == 1.0 else out * v_scale


def page_size_of(kv: LayerKV | LatentKV) -> int:
    return (kv.rows if isinstance(kv, LatentKV) else kv.k).shape[1]


def _keys_and_values(kv: LayerKV | LatentKV, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values, [tokens, kv_heads, dim] each, of all tokens of pages [n] int64, without their scales.
    Latent rows are one head, whose values are a part of its keys. dtype: FP8 is converted to this dtype."""
    if isinstance(kv, LatentKV):
        rows = read_pages(kv.rows, pages, dtype).flatten(0, 1).unsqueeze(1)
        return rows, rows[..., : kv.latent]
    return read_pages(kv.k, pages, dtype).flatten(0, 1), read_pages(kv.v, pages, dtype).flatten(0, 1)


def _scales(kv: LayerKV | LatentKV) -> tuple[float, float]:
    """Return the factors on stored keys and on stored values."""
    return (kv.scale, kv.scale) if isinstance(kv, LatentKV) else (kv.k_scale, kv.v_scale)
