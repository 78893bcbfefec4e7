"""Views of one layer's KV for backends and kernels: one type per layout (`aerie.attention.kv_cache.layout`)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerKV:
    """Backends' view of a layer with keys and values per head.

    k, v: [num_pages + 1, page_size, kv_heads, head_dim], contiguous; padding rows write to page 0.
    k_scale, v_scale: factors on the stored numbers; 1 unless they are FP8 (`aerie.kernels.kv.fp8`).
    """

    k: Tensor
    v: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True)
class LatentKV:
    """Backends' view of a layer with latent rows.

    rows: [num_pages + 1, page_size, latent + rotated], contiguous; the keys of q [rows, q_heads, latent + rotated].
    latent: number of leading dimensions that are also the value; `forward` returns their weighted sums [rows, q_heads,
        latent].
    scale: factor on the stored numbers; 1 unless they are FP8 (`aerie.kernels.kv.fp8`).
    """

    rows: Tensor
    latent: int
    scale: float = 1.0


@dataclass(frozen=True)
class ExpandedKV:
    """Keys and values expanded from latent rows, for all tokens that the chunks attend to, chunk by chunk.

    kv: [tokens, heads, key_dim + value_dim], contiguous. k_pe: [tokens, rotated], the rotated part of keys, which heads
        share; last stride 1. first: [C] int32, each chunk's first token.
    """

    kv: Tensor
    k_pe: Tensor
    first: Tensor
    key_dim: int
