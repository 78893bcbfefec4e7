"""Masks of the tokens that a grammar forbids."""

import torch
from torch import Tensor

from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.sampling.filters import check_rows

FREE = -1  # `index` of slots without a grammar


def _check(logits: Tensor, slots: Tensor, index: Tensor, words: Tensor, first: int) -> None:
    check_rows(logits, slots)
    assert index.dtype == words.dtype == torch.int32 and index.is_contiguous() and words.is_contiguous()


@operation(Implementation("triton", "aerie.kernels.sampling.masks_triton:apply_masks", on_gpu), contract=_check)
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
