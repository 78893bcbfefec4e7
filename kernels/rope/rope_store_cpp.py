"""RoPE and the write of K/V for float32 heads on CPUs."""

from ctypes import c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.cpp_library import function
from aerie.kernels.kv.batches import LayerKV
from aerie.kernels.norm.head_norms import HeadNorms
from aerie.kernels.rope.rope_store import Angles


@cache
def _function() -> Any:
    p, i = c_void_p, c_int64
    return function("rope_store", p, i, i, p, i, p, i, i, i, p, p, i, p, p, p, p, i, p, c_int32)


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles,
    kv: LayerKV,
    slot_mapping: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """See `aerie.kernels.rope.rope_store.rope_store`."""
    rows, heads, size = q.shape
    out = torch.empty((rows, heads, size), dtype=torch.float32)
    _function()(
        q.data_ptr(),
        q.stride(0),
        heads,
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        k.shape[1],
        size,
        angles.cos.data_ptr(),
        angles.sin.data_ptr(),
        angles.cos.shape[1],
        angles.index.data_ptr(),
        slot_mapping.data_ptr(),
        kv.k.data_ptr(),
        kv.v.data_ptr(),
        rows,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
