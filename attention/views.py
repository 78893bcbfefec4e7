"""What backends and kernels see of one layer's KV: a type for each way of keeping it (`attention.kv_cache.layout`)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerKV:
    """One layer that keeps keys and values by heads, as backends see it.

    k, v: [num_pages + 1, page_size, kv_heads, head_dim], contiguous; page 0 takes the writes of padding rows.
    """

    k: Tensor
    v: Tensor
