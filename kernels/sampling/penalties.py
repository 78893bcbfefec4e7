"""Masks of the tokens that a grammar forbids; penalties, logit biases and min_tokens. All are applied before
temperature and filters."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.sampling.filters import check_rows


@dataclass(frozen=True)
class PenaltyTables:
    """Penalty parameters of S slots.

    output_counts  [S, vocab] int32: number of times each token was emitted
    in_prompt      [S, vocab] bool
    bias           [S, vocab] float32
    penalties      [S, 3] float32: presence, frequency, repetition - 1
    min_len        [S] int64: stop tokens are forbidden at lower positions
    stop_ids       [S, n] int64; negative entries are unused
    shapes_logits  [S] bool: whether the request has any of these settings
    """

    output_counts: Tensor
    in_prompt: Tensor
    bias: Tensor
    penalties: Tensor
    min_len: Tensor
    stop_ids: Tensor
    shapes_logits: Tensor


def _check(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    tables: PenaltyTables,
    path: Tensor | None = None,
    path_tokens: Tensor | None = None,
) -> None:
    check_rows(logits, slots)
    assert tables.output_counts.shape[1] == logits.shape[1] and (path is None) == (path_tokens is None)
    assert positions.dtype == torch.int64 and positions.numel() == logits.shape[0]


@operation(Implementation("triton", "aerie.kernels.sampling.penalties_triton:apply_penalties", on_gpu), contract=_check)
def apply_penalties(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    tables: PenaltyTables,
    path: Tensor | None = None,
    path_tokens: Tensor | None = None,
) -> Tensor:
    """Return logits with penalties, biases and min_tokens applied (OpenAI's presence and frequency penalty;
    the repetition penalty of arXiv 1909.05858, section 4.1).

    logits       [B * R, vocab], any floating dtype, last stride 1: R rows of each of B requests
    slots        [B] int64
    positions    [B, R] int64, positions of the tokens to be chosen
    path         [B, R, W] bool: ancestors of each row and the row itself, which count as output; None without a tree
    path_tokens  [B, W] int64, tokens of the nodes; negative ones count as token 0
    ->           [B * R, vocab] float32; rows are copied unless `shapes_logits` is set for their slot
    """
    rows = logits.float().view(*positions.shape, -1)
    counts = tables.output_counts[slots].unsqueeze(1).expand(rows.shape)
    if path is not None and path_tokens is not None:
        tokens = path_tokens.clamp_min(0).unsqueeze(1).expand(path.shape)
        counts = counts.scatter_add(2, tokens, path.int())
    presence, frequency, repetition = tables.penalties[slots].view(-1, 1, 3).unbind(-1)
    seen = (counts > 0) | tables.in_prompt[slots].unsqueeze(1)
    factor = repetition.unsqueeze(-1) + 1.0
    changed = torch.where(seen, torch.where(rows > 0, rows / factor, rows * factor), rows)
    changed = changed - counts * frequency.unsqueeze(-1) - (counts > 0) * presence.unsqueeze(-1)
    changed = changed + tables.bias[slots].unsqueeze(1)
    early = positions < tables.min_len[slots].unsqueeze(1)
    stop = torch.zeros(rows.shape[0], rows.shape[2] + 1, dtype=torch.bool, device=rows.device)
    ids = tables.stop_ids[slots]
    stop.scatter_(1, torch.where(ids >= 0, ids, rows.shape[2]), True)
    changed = changed.masked_fill(early.unsqueeze(-1) & stop[:, None, :-1], float("-inf"))
    return torch.where(tables.shapes_logits[slots].view(-1, 1, 1), changed, rows).flatten(0, 1)


FREE = -1  # `index` of slots without a grammar


def _check_masks(logits: Tensor, slots: Tensor, index: Tensor, words: Tensor, first: int) -> None:
    check_rows(logits, slots)
    assert index.dtype == words.dtype == torch.int32 and index.is_contiguous() and words.is_contiguous()


@operation(
    Implementation("triton", "aerie.kernels.sampling.penalties_triton:apply_masks", on_gpu), contract=_check_masks
)
def apply_masks(logits: Tensor, slots: Tensor, index: Tensor, words: Tensor, first: int) -> None:
    """Set the logits of forbidden tokens to minus infinity.

    logits  [B * R, n], any floating dtype, last stride 1, written: R rows of each of B requests
    slots   [B] int64
    index   [num_slots + 1] int32: each slot's first row of `words`, or FREE
    words   [masks, w] int32: bit t % 32 of word t // 32 allows token t
    first   token id of the first column; tokens from 32 * w on are unchanged
    """
    rows = logits.shape[0] // slots.shape[0]
    base = index[slots]
    for request in torch.nonzero(base != FREE).flatten().tolist():
        mine = words[int(base[request]) :][:rows]
        token = torch.arange(first, min(first + logits.shape[1], 32 * mine.shape[1]), device=logits.device)
        allowed = (mine[:, token // 32] >> (token % 32) & 1).bool()
        row = logits[request * rows : (request + 1) * rows, : token.shape[0]]
        row.masked_fill_(~allowed, float("-inf"))
