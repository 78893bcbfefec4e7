"""Norms per head, rotary position embedding (RoPE, arXiv 2104.09864) and the write of k and v to their pages:
`rope_store`; `rope` for q alone. Angles of rows, and rotation in torch: half-split order, and DeepSeek's pairs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aerie.kernels.cpp_library import compiles
from aerie.kernels.kv.batches import LayerKV
from aerie.kernels.kv.stored_values import without_nan, write_rows
from aerie.kernels.norm.head_norms import HeadNorms
from aerie.kernels.operation import Implementation, on_gpu, operation


@dataclass(frozen=True)
class Angles:
    """RoPE angles of a pass's rows: row i is rotated by cos[index[i]] and sin[index[i]].

    cos, sin: [positions, rotated dimensions / 2] float32, contiguous.
    index: [rows] int64.
    """

    cos: Tensor
    sin: Tensor
    index: Tensor

    def by_row(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin of each row, [rows, rotated dimensions / 2] float32."""
        return self.cos[self.index], self.sin[self.index]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `rotated` dimensions of x [rows, heads, head_dim] by the angles of the rows.

    cos, sin: [rows, rotated / 2] float32.
    Returns x's shape and dtype.
    """
    rotated = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :rotated].float().chunk(2, dim=-1)
    out = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return out if rotated == x.shape[-1] else torch.cat((out, x[..., rotated:]), dim=-1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs: dimensions 2 i and 2 i + 1 by angle i. Returns x's shape and dtype."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def _check_rope(q: Tensor, angles: Angles, norms: HeadNorms | None = None) -> None:
    rows, _, head_dim = q.shape
    cos, sin, index = angles.cos, angles.sin, angles.index
    assert q.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous()
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == sin.shape and 2 * cos.shape[1] <= head_dim
    assert index.dtype == torch.int64 and index.shape == (rows,) and index.is_contiguous()
    for weight in () if norms is None else (norms.q, norms.k):
        assert weight is None or (weight.shape == (head_dim,) and weight.is_contiguous())


def _check_rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles,
    kv: LayerKV,
    slot_mapping: Tensor,
    norms: HeadNorms | None = None,
) -> None:
    _check_rope(q, angles, norms)
    assert k.stride(2) == v.stride(2) == 1 and q.dtype == k.dtype == v.dtype and k.shape == v.shape
    assert q.shape[0] == k.shape[0] and q.shape[1] % k.shape[1] == 0 and q.shape[2] == k.shape[2]
    assert kv.k.is_contiguous() and kv.v.is_contiguous()
    assert (
        slot_mapping.dtype == torch.int64 and slot_mapping.shape == angles.index.shape and slot_mapping.is_contiguous()
    )


def _serves_host(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles,
    kv: LayerKV,
    slot_mapping: Tensor,
    norms: HeadNorms | None = None,
) -> bool:
    size = q.shape[2]
    adjacent = all(x.dtype == torch.float32 and x.stride(1) == size and x.stride(2) == 1 for x in (q, k, v))
    return norms is None and adjacent and kv.k.dtype == kv.v.dtype == torch.float32


@operation(
    Implementation(
        "triton_norm",
        "aerie.kernels.rope.rope_store_normed_triton:rope_store",
        on_gpu,
        lambda q, k, v, angles, kv, slot_mapping, norms=None: norms is not None,
        "norms",
    ),
    Implementation(
        "triton",
        "aerie.kernels.rope.rope_store_triton:rope_store",
        on_gpu,
        lambda q, k, v, angles, kv, slot_mapping, norms=None: (
            norms is None and _is_power_of_two(q.shape[2]) and _is_power_of_two(angles.cos.shape[1])
        ),
        "no norms; head_dim and rotated dimensions powers of two",
    ),
    Implementation(
        "c++",
        "aerie.kernels.rope.rope_store_cpp:rope_store",
        compiles,
        _serves_host,
        "no norms; float32",
    ),
    contract=_check_rope_store,
)
def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles,
    kv: LayerKV,
    slot_mapping: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Return rotated q; write rotated k, and v, to the layer's pages. RoPE rotates the first `rotated` dimensions of
    each head. Norms come first, and their results are rounded to the heads' dtype.

    q             [rows, q_heads, head_dim], last stride 1; without norms it may be rotated in place: use the result.
                  May have 0 heads
    k, v          [rows, kv_heads, head_dim] of q's dtype, last stride 1, unchanged; may be the same tensor
    angles        of the rows; rotated is even and at most head_dim
    kv            the layer's pages, written as `aerie.kernels.kv.stored_values.stored`, after rounding to k's dtype; 0
                  instead of NaN in v, and NaN in the k of that head (`aerie.kernels.kv.stored_values`)
    slot_mapping  [rows] int64, token indices; if rows share an index (padding), any of them is stored
    norms         of q and k, perhaps of v; None: none
    ->            as q; with norms contiguous
    """
    if norms is not None:
        q, k, v = norms.norm_q(q), norms.norm_k(k), norms.norm_v(v)
    cos, sin = angles.by_row()
    k, v = without_nan(rotate(k, cos, sin), v)
    write_rows(kv.k, slot_mapping, k, kv.k_scale)
    write_rows(kv.v, slot_mapping, v, kv.v_scale)
    return rotate(q, cos, sin)


@operation(
    Implementation(
        "triton_norm",
        "aerie.kernels.rope.rope_store_normed_triton:rope",
        on_gpu,
        lambda q, angles, norms=None: norms is not None,
        "norms",
    ),
    Implementation(
        "triton",
        "aerie.kernels.rope.rope_store_triton:rope",
        on_gpu,
        lambda q, angles, norms=None: norms is None and _is_power_of_two(angles.cos.shape[1]),
        "no norms; rotated dimensions a power of two",
    ),
    contract=_check_rope,
)
def rope(q: Tensor, angles: Angles, norms: HeadNorms | None = None) -> Tensor:
    """Return rotated q, as `rope_store` does, for a layer that attends to the KV of an earlier layer.

    q       [rows, q_heads, head_dim], last stride 1; without norms it may be rotated in place: use the result
    angles  of the rows; rotated is even and at most head_dim
    norms   of q; None: none
    ->      as q; with norms contiguous
    """
    return rotate(q if norms is None else norms.norm_q(q), *angles.by_row())
