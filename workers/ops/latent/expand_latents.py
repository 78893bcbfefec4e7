"""Expands cached latent rows to keys and values per head, for prompt chunks (`attention.expansion`)."""

from torch import Tensor
from torch.nn.functional import linear

from attention.ops.operation import Implementation, on_gpu, operation


@operation(Implementation("triton", "workers.ops.latent.expand_latents_triton:expand_latents", on_gpu))
def expand_latents(rows: Tensor, tokens: Tensor, ends: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return latent rows times `weight`, and their rotated parts.

    rows    [pages, page_size, latent + rotated], contiguous; rotated a power of two, latent a multiple of 16
    tokens  [T] int64, token indices into all pages
    ends    [chunks + 1] int32: start of each chunk's tokens, and the end of the last; later rows of the result are
            undefined

    weight  [N, latent], contiguous, of rows' type
    ->      [T, N]; [T, rotated]
    """
    chosen, latent = rows.view(-1, rows.shape[2])[tokens], weight.shape[1]
    return linear(chosen[:, :latent], weight), chosen[:, latent:]
