"""RMSNorm (arXiv 1910.07467) in torch, and the norms per head that some models apply to q, k and v before RoPE."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorms over each head's dimensions: of queries and keys (Qwen3), also of values (Gemma 4).

    q, k: weights, [head_dim] in the model's dtype or float32, contiguous; both of one dtype. k is None in layers that
        attend to an earlier layer's KV.
    norms_values: values are normed, without a weight.
    """

    q: Tensor
    k: Tensor | None
    eps: float
    norms_values: bool = False

    def norm_q(self, q: Tensor) -> Tensor:
        """Return the norm of q [rows, q_heads, head_dim]."""
        return rms_norm(q, self.q, self.eps)

    def norm_k(self, k: Tensor) -> Tensor:
        """Return the norm of k [rows, kv_heads, head_dim]."""
        return k if self.k is None else rms_norm(k, self.k, self.eps)

    def norm_v(self, v: Tensor) -> Tensor:
        """Return the norm of v [rows, kv_heads, head_dim], or v."""
        return rms_norm(v, None, self.eps) if self.norms_values else v


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension; float32 inside. x / rms(x) is rounded to x's dtype before it
    is multiplied by a weight of that dtype. With a float32 weight only the product is rounded.

    x: [..., size] in the model's dtype.
    weight: [size] in the model's dtype or float32; None: ones.
    Returns x's shape and dtype.
    """
    full = x.float()
    scaled = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return scaled.to(x.dtype)
    return (scaled * weight).to(x.dtype) if weight.dtype == torch.float32 else scaled.to(x.dtype) * weight
