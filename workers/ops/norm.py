"""RMSNorm (arXiv 1910.07467), alone and after the residual's addition."""

import torch
from torch import Tensor

from attention.ops.operation import Implementation, on_gpu, operation


@operation(Implementation("triton", "workers.ops.norm_triton:rms_norm", on_gpu))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; float32 inside, rounded to x's type before the weight.

    x       [..., size], of the model's type
    weight  [size], of the model's type
    ->      as x
    """
    full = x.float()
    return (full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@operation(Implementation("triton", "workers.ops.norm_triton:add_rms_norm", on_gpu))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMSNorm of x + residual; the sum is written into `residual`.

    x         [..., size], of the model's type
    residual  as x, written
    weight    [size], of the model's type
    ->        as x
    """
    residual += x
    return rms_norm.reference(residual, weight, eps)
