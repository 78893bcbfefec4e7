"""What a grammar does to logits. Called by `workers.sampling.sampler`."""

import torch
from torch import Tensor

from workers.structured_output.mask_table import FREE, MaskTable


def apply_masks(logits: Tensor, slots: Tensor, masks: MaskTable, first: int) -> None:
    """Tokens that are not allowed to minus infinity, in place: logits [B * R, n] of token ids first, first + 1, ..., R
    rows of each of the requests in slots [B] int64. The reference of `workers.sampling.kernels.masks`."""
    if logits.is_cuda:
        from workers.sampling.kernels.masks import apply_masks as fast_apply_masks

        fast_apply_masks(logits, slots, masks.index, masks.words, first)
        return
    rows = logits.shape[0] // slots.shape[0]
    base = masks.index[slots]
    for request in torch.nonzero(base != FREE).flatten().tolist():
        words = masks.words[int(base[request]) :][:rows]
        token = torch.arange(first, min(first + logits.shape[1], 32 * words.shape[1]))
        allowed = (words[:, token // 32] >> (token % 32) & 1).bool()
        mine = logits[request * rows : (request + 1) * rows, : token.shape[0]]
        mine.masked_fill_(~allowed, float("-inf"))
