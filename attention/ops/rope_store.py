"""Applies RoPE (arXiv 2104.09864, half-split layout) to q and k, and writes k and v to their pages; or to q alone."""

from torch import Tensor

from attention.fp8 import write_rows
from attention.ops.operation import Implementation, on_gpu, operation
from attention.rotation import rotate
from attention.views import LayerKV


def _has_tiles(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, *_: object) -> bool:
    return all(size & (size - 1) == 0 for size in (q.shape[2], cos.shape[1]))


@operation(
    Implementation(
        "triton",
        "attention.ops.rope_store_triton:rope_store",
        on_gpu,
        _has_tiles,
        "head_dim and rotated dimensions powers of two",
    )
)
def rope_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, index: Tensor, kv: LayerKV, slot_mapping: Tensor
) -> Tensor:
    """Return q rotated; write k rotated, and v, into the layer's pages. The first `rotated` dimensions of each head are
    rotated, the others stay as they are.

    q             [rows, q_heads, head_dim], last stride 1; may be rotated in place: use the result
    k, v          [rows, kv_heads, head_dim], last stride 1, unchanged
    cos, sin      [any, rotated / 2] float32, contiguous; rotated is even and at most head_dim
    index         [rows] int64, each row's line of cos and sin
    kv            the layer's pages, written as `attention.fp8.stored`, after rounding to k's dtype
    slot_mapping  [rows] int64, token indices; rows that share one (padding) leave any one of their values
    ->            as q
    """
    cos, sin = cos[index], sin[index]
    write_rows(kv.k, slot_mapping, rotate(k, cos, sin), kv.k_scale)
    write_rows(kv.v, slot_mapping, v, kv.v_scale)
    return rotate(q, cos, sin)


def _has_rotary_tiles(q: Tensor, cos: Tensor, *_: object) -> bool:
    return cos.shape[1] & (cos.shape[1] - 1) == 0


@operation(
    Implementation(
        "triton",
        "attention.ops.rope_store_triton:rope",
        on_gpu,
        _has_rotary_tiles,
        "rotated dimensions a power of two",
    )
)
def rope(q: Tensor, cos: Tensor, sin: Tensor, index: Tensor) -> Tensor:
    """Return q rotated, as `rope_store` does, for a layer that attends to the KV of an earlier one.

    q         [rows, q_heads, head_dim], last stride 1; may be rotated in place: use the result
    cos, sin  [any, rotated / 2] float32, contiguous; rotated is even and at most head_dim
    index     [rows] int64, each row's line of cos and sin
    ->        as q
    """
    return rotate(q, cos[index], sin[index])
