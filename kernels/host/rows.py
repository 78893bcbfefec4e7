"""Norms, the gate of MLPs, and RoPE with the write of K/V, for float32 rows on CPUs: implementations of operations in
`aerie.kernels.norm` and `aerie.kernels.rope`."""

from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.host.library import library
from aerie.kernels.kv.views import LayerKV
from aerie.kernels.norm.head_norms import HeadNorms
from aerie.kernels.rope.rotation import Angles


@cache
def _functions() -> tuple[Any, Any, Any]:
    lib = library()
    assert lib is not None, "asked only where `compiles`"
    p, i, n = c_void_p, c_int64, c_int32
    lib.rms_norm.argtypes = [p, i, p, p, i, i, c_float, p, n]
    lib.silu_mul.argtypes = [p, i, i, p, n]
    lib.rope_store.argtypes = [p, i, i, p, i, p, i, i, i, p, p, i, p, p, p, p, i, p, n]
    found = lib.rms_norm, lib.silu_mul, lib.rope_store
    for function in found:
        function.restype = None
    return found


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `aerie.kernels.norm.norm.rms_norm`."""
    return _norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `aerie.kernels.norm.norm.add_rms_norm`."""
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    size, out = weight.shape[0], torch.empty_like(x)
    added = None if residual is None else residual.data_ptr()
    rows = x.numel() // max(size, 1)
    threads = torch.get_num_threads()
    _functions()[0](x.data_ptr(), size, added, weight.data_ptr(), rows, size, eps, out.data_ptr(), threads)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `aerie.kernels.norm.activation.silu_mul`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size))
    _functions()[1](gate_up.data_ptr(), rows, size, out.data_ptr(), torch.get_num_threads())
    return out


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
    out = torch.empty((rows, heads, size))
    _functions()[2](
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
