"""Views of one layer's KV for backends and kernels: one type per layout (`attention.kv_cache.layout`)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerKV:
    """One layer that keeps keys and values by heads, as backends see it.

    k, v: [num_pages + 1, page_size, kv_heads, head_dim], contiguous; page 0 takes the writes of padding rows.
    k_scale, v_scale: factors on what is stored, 1 unless it is FP8 (`attention.fp8`).
    """

    k: Tensor
    v: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True)
class LatentKV:
    """One layer that keeps latent rows, as backends see it.

    rows: [num_pages + 1, page_size, latent + rotated], contiguous, what q [rows, q_heads, latent + rotated] is
        multiplied with.
    latent: the leading dimensions, whose weighted sums [rows, q_heads, latent] `forward` returns.
    scale: factor on what is stored, 1 unless it is FP8 (`attention.fp8`).
    """

    rows: Tensor
    latent: int
    scale: float = 1.0


@dataclass(frozen=True)
class ExpandedKV:
    """Keys and values expanded from latent rows: of all tokens of all chunks' requests, chunk after chunk.

    kv: [tokens, heads, key_dim + value_dim], contiguous. k_pe: [tokens, rotated], the part of keys that heads share,
        rotated; last stride 1. first: [C] int32, each chunk's first token.
    """

    kv: Tensor
    k_pe: Tensor
    first: Tensor
    key_dim: int
