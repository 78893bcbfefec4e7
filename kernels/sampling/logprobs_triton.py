# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels of `aerie.kernels.sampling.logprobs`: one pass over the logits, then one over a few blocks.

The k largest logits of a row are in the k blocks with the largest maxima. So `topk` runs over one number per block, and
then over k blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PART, BLOCK = 4096, 128


@triton.jit
def _summarize(x_ptr, x_stride, size, norm_ptr, peak_ptr, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Write log(sum(exp)) of a part, and the maximum of each of its blocks."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tl.arange(0, PART // BLOCK)
    column = part * PART + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * x_stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
    peaks = tl.max(x, 1)
    peak = tl.max(peaks, 0)
    shifted = tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak))
    # the sum is at least 1, except in a part that is all minus infinity
    total = tl.maximum(tl.sum(tl.sum(shifted, 1), 0), 1.0)
    tl.store(norm_ptr + row * tl.num_programs(1) + part, peak + tl.log(total))
    block += part * (PART // BLOCK)
    blocks = tl.cdiv(size, BLOCK)
    tl.store(peak_ptr + row * blocks + block, peaks, mask=block < blocks)


def norms_and_top(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`aerie.kernels.sampling.logprobs.norms_and_top`."""
    rows, size = logits.shape
    parts, blocks = triton.cdiv(size, PART), triton.cdiv(size, BLOCK)
    norms = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    peaks = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    _summarize[(rows, parts)](logits, logits.stride(0), size, norms, peaks, PART=PART, BLOCK=BLOCK, num_warps=4)
    best = peaks.topk(min(k, blocks), -1).indices
    column = (best.unsqueeze(2) * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    inside = column.clamp_max(size - 1)
    near = logits.gather(1, inside).float().masked_fill(column >= size, float("-inf"))
    top, place = near.topk(k, -1)
    return torch.logsumexp(norms, -1), top, inside.gather(1, place)
