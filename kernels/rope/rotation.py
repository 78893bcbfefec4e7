"""Rotary position embedding (arXiv 2104.09864): the angles of rows, and the rotation in torch, in the half-split order
of most checkpoints and in DeepSeek's. Layouts use it on CPUs; tests compare the kernel
`aerie.kernels.rope.rope_store_triton` with it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Angles:
    """RoPE angles of a pass's rows: row i is rotated by cos[index[i]] and sin[index[i]].

    cos, sin: [positions, rotated dimensions / 2] float32, contiguous.
    index: [rows] int64.
    """

    cos: Tensor
    sin: Tensor
    index: Tensor

    def of_rows(self) -> tuple[Tensor, Tensor]:
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
