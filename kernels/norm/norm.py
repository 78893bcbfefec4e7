"""RMSNorm (arXiv 1910.07467), alone or with the residual addition."""

import torch
from torch import Tensor

from aerie.kernels.cpp_library import compiles
from aerie.kernels.norm import head_norms
from aerie.kernels.operation import Implementation, on_gpu, operation


def _check_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    assert weight.shape == x.shape[-1:] and weight.is_contiguous() and weight.dtype in (x.dtype, torch.float32)


def _check_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    _check_norm(x, weight, eps)
    assert x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape and x.dtype == residual.dtype


def _is_float32(x: Tensor, weight: Tensor, eps: float) -> bool:
    return x.dtype == weight.dtype == torch.float32 and x.is_contiguous()


def _are_float32(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> bool:
    return _is_float32(x, weight, eps) and residual.is_contiguous()


@operation(
    Implementation("triton", "aerie.kernels.norm.norm_triton:rms_norm", on_gpu),
    Implementation("c++", "aerie.kernels.norm.norm_cpp:rms_norm", compiles, _is_float32, "float32"),
    contract=_check_norm,
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, computed in float32. x / rms(x) is rounded to x's dtype
    before it is multiplied by a weight of that dtype, but not before a float32 weight.

    x       [..., size] in the model's dtype
    weight  [size] in the model's dtype or float32, contiguous
    ->      as x
    """
    return head_norms.rms_norm(x, weight, eps)


@operation(
    Implementation("triton", "aerie.kernels.norm.norm_triton:add_rms_norm", on_gpu),
    Implementation("c++", "aerie.kernels.norm.norm_cpp:add_rms_norm", compiles, _are_float32, "float32"),
    contract=_check_add_norm,
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x + residual, and write the sum to `residual`.

    x         [..., size] in the model's dtype, contiguous
    residual  as x, written
    weight    [size] in the model's dtype or float32, contiguous
    ->        as x
    """
    residual += x
    return rms_norm.reference(residual, weight, eps)
