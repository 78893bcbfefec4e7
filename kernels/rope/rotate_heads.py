"""Rotary position embedding in place, for the many rows of a vision tower: one launch for the queries and keys."""

import torch
from torch import Tensor

from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.rope.rope_store import rotate


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    rows, _, head_dim = x.shape
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == sin.shape == (rows, head_dim / 2)
    assert x.stride(2) == 1 and cos.stride(1) == sin.stride(1) == 1 and cos.stride(0) == sin.stride(0)


@operation(
    Implementation("triton", "aerie.kernels.rope.rotate_heads_triton:rotate_heads", on_gpu),
    contract=_check,
)
def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate each head of x by the angles of its row, in place: half-split order, computed in float32.

    x         [rows, heads, head_dim], last stride 1, written; head_dim is even
    cos, sin  [rows, head_dim / 2] float32, last stride 1, of equal row strides
    """
    x.copy_(rotate(x, cos, sin))
