"""Norms and the gate of MLPs for float32 rows on CPUs."""

from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aerie.kernels.cpp_library import function


@cache
def _functions() -> tuple[Any, Any]:
    p, i, n = c_void_p, c_int64, c_int32
    return function("rms_norm", p, i, p, p, i, i, c_float, p, n), function("silu_mul", p, i, i, p, n)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement `aerie.kernels.norm.norm.rms_norm`: return x / rms(x) * weight over the last dimension."""
    return _norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement `aerie.kernels.norm.norm.add_rms_norm`: return the RMSNorm of the sum x + residual,
    which replaces residual."""
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Call the C++ norm; with a residual, add x to it first."""
    size, out = weight.shape[0], torch.empty_like(x)
    added = None if residual is None else residual.data_ptr()
    rows = x.numel() // max(size, 1)
    threads = torch.get_num_threads()
    _functions()[0](x.data_ptr(), size, added, weight.data_ptr(), rows, size, eps, out.data_ptr(), threads)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Implement `aerie.kernels.norm.norm.silu_mul`: return silu(gate) * up."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=torch.float32)
    _functions()[1](gate_up.data_ptr(), rows, size, out.data_ptr(), torch.get_num_threads())
    return out
