"""Expands cached latent rows to keys and values per head, for prompt chunks (`aerie.attention.expansion`)."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from aerie.kernels.kv.fp8 import FP8
from aerie.kernels.operation import Implementation, on_gpu, operation


def _check(rows: Tensor, tokens: Tensor, ends: Tensor, weight: Tensor, scale: float = 1.0) -> None:
    assert rows.dim() == 3 and rows.is_contiguous() and weight.is_contiguous() and rows.dtype in (weight.dtype, FP8)
    assert weight.shape[1] % 16 == 0 and (rows.shape[2] - weight.shape[1]).bit_count() == 1
    assert tokens.dtype == torch.int64 and tokens.is_contiguous()
    assert ends.dtype == torch.int32 and ends.is_contiguous()


@operation(
    Implementation("triton", "aerie.kernels.latent.expand_latents_triton:expand_latents", on_gpu), contract=_check
)
def expand_latents(
    rows: Tensor, tokens: Tensor, ends: Tensor, weight: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return latent rows times `weight`, and their RoPE parts, in weight's dtype.

    rows    [pages, page_size, latent + rotated], contiguous; rotated a power of two, latent a multiple of 16
    tokens  [T] int64, token indices into all pages
    ends    [chunks + 1] int32: start of each chunk's tokens, and the last chunk's end, after which results are
            undefined
    weight  [N, latent], contiguous; of rows' dtype, unless that is FP8
    scale   factor on rows (`LatentKV.scale`)
    ->      [T, N]; [T, rotated]
    """
    flat, latent = rows.view(-1, rows.shape[2]), weight.shape[1]
    if rows.dtype != FP8:
        chosen = flat[tokens]
        return linear(chosen[:, :latent], weight), chosen[:, latent:]
    chosen = flat.view(torch.uint8)[tokens].view(FP8).to(weight.dtype)
    return linear(chosen[:, :latent], weight) * scale, chosen[:, latent:] * scale
