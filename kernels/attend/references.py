"""Attention in float64 over the contents of pages, request by request: the references of this folder's kernels."""

import torch
from torch import Tensor

from aerie.kernels.attend.scores import ScoreRule, row_weights
from aerie.kernels.kv.batches import DecodeBatch, LatentKV, LayerKV, PrefillBatch
from aerie.kernels.kv.stored_values import read_pages
from aerie.kernels.kv.tree_masks import seen_columns


def decode(q: Tensor, kv: LayerKV, batch: DecodeBatch, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
    """Return attention of the rows of a round, [B * R, q_heads, head_dim] float64. Arguments: `attend_decode`."""
    batch = batch.for_window(rule.window)
    page_size, num_kv_heads, head_dim = kv.k.shape[1:]
    group, out = q.shape[1] // num_kv_heads, torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for b, prefix in enumerate(batch.prefix_len.tolist()):
        pages = batch.page_table[b, : -(-(prefix + batch.suffix_len) // page_size)].long()
        keys, values = (
            (read_pages(x, pages, torch.float64).double() * factor)
            .view(-1, num_kv_heads, head_dim)[: prefix + batch.suffix_len]
            .repeat_interleave(group, 1)
            for x, factor in ((kv.k, kv.k_scale), (kv.v, kv.v_scale))
        )
        seen = seen_columns(batch.mask[b : b + 1], batch.suffix_len)[0]
        seen = within_window(torch.cat((seen.new_ones(batch.rows, prefix), seen), 1), batch.window)
        rows = slice(b * batch.rows, (b + 1) * batch.rows)
        scores = torch.einsum("rhd,nhd->hrn", q[rows].double(), keys) * rule.scale
        out[rows] = torch.einsum("hrn,nhd->rhd", row_weights(scores, ~seen, rule, _of_heads(sinks)), values)
    return out


def prefill(q: Tensor, kv: LayerKV, batch: PrefillBatch, rule: ScoreRule, sinks: Tensor | None = None) -> Tensor:
    """Return attention of prompt chunks, [rows, q_heads, head_dim] float64. Arguments: `attend_prefill`."""
    batch = batch.for_window(rule.window)
    page_size, num_kv_heads, head_dim = kv.k.shape[1:]
    group, out = q.shape[1] // num_kv_heads, torch.empty(q.shape, dtype=torch.float64, device=q.device)
    starts, indptr, reach = batch.starts.tolist(), batch.qo_indptr.tolist(), batch.reach(rule.within_images)
    out[indptr[-1] :] = 0.0
    for c, start in enumerate(starts):
        rows = slice(indptr[c], indptr[c + 1])
        length = start + rows.stop - rows.start
        pages = batch.page_table[c, : -(-length // page_size)].long()
        keys, values = (
            (read_pages(x, pages, torch.float64).double() * factor)
            .view(-1, num_kv_heads, head_dim)[:length]
            .repeat_interleave(group, 1)
            for x, factor in ((kv.k, kv.k_scale), (kv.v, kv.v_scale))
        )
        hidden = masked_positions(start, rows.stop - rows.start, batch.window).to(q.device)
        if reach is not None:
            position = torch.arange(length, device=q.device)
            hidden &= ~((position >= position[start:].unsqueeze(1)) & (position <= reach[rows].unsqueeze(1)))
        scores = torch.einsum("rhd,nhd->hrn", q[rows].double(), keys) * rule.scale
        out[rows] = torch.einsum("hrn,nhd->rhd", row_weights(scores, hidden, rule, _of_heads(sinks)), values)
    return out


def latent_decode(q: Tensor, kv: LatentKV, batch: DecodeBatch, rule: ScoreRule) -> Tensor:
    """Return attention of the rows of a round over latent rows, [B * R, heads, latent] float64."""
    out = torch.empty((*q.shape[:2], kv.latent), dtype=torch.float64, device=q.device)
    page_size, width = kv.rows.shape[1:]
    for b, prefix in enumerate(batch.prefix_len.tolist()):
        length = prefix + batch.suffix_len
        pages = batch.page_table[b, : -(-length // page_size)].long()
        rows = (read_pages(kv.rows, pages, torch.float64).double() * kv.scale).view(-1, width)[:length]
        seen = seen_columns(batch.mask[b : b + 1], batch.suffix_len)[0]
        seen = within_window(torch.cat((seen.new_ones(batch.rows, prefix), seen), 1), batch.window)
        mine = slice(b * batch.rows, (b + 1) * batch.rows)
        scores = torch.einsum("rhd,nd->hrn", q[mine].double(), rows) * rule.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[mine] = torch.einsum("hrn,nd->rhd", weights, rows[:, : kv.latent])
    return out


def latent_prefill(q: Tensor, kv: LatentKV, batch: PrefillBatch, rule: ScoreRule) -> Tensor:
    """Return attention of prompt chunks over latent rows, [rows, heads, latent] float64."""
    out = torch.zeros((*q.shape[:2], kv.latent), dtype=torch.float64, device=q.device)
    page_size, width = kv.rows.shape[1:]
    starts, indptr = batch.starts.tolist(), batch.qo_indptr.tolist()
    for c, start in enumerate(starts):
        mine = slice(indptr[c], indptr[c + 1])
        length = start + mine.stop - mine.start
        pages = batch.page_table[c, : -(-length // page_size)].long()
        rows = (read_pages(kv.rows, pages, torch.float64).double() * kv.scale).view(-1, width)[:length]
        hidden = masked_positions(start, mine.stop - mine.start, batch.window).to(q.device)
        scores = torch.einsum("rhd,nd->hrn", q[mine].double(), rows) * rule.scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[mine] = torch.einsum("hrn,nd->rhd", weights, rows[:, : kv.latent])
    return out


def within_window(seen: Tensor, window: int | None) -> Tensor:
    """Limit seen [rows, positions] bool to the last `window` positions that each row sees."""
    return seen if window is None else seen & (seen.flip(1).cumsum(1).flip(1) <= window)


def masked_positions(start: int, rows: int, window: int | None) -> Tensor:
    """Return [rows, start + rows] bool: the positions that rows from `start` do not see."""
    every = torch.ones(rows, start + rows, dtype=torch.bool)
    return every.triu(start + 1) if window is None else every.triu(start + 1) | every.tril(start - window)


def _of_heads(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.view(-1, 1, 1)
