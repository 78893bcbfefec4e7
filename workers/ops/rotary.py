"""`Angles`: RoPE angles of a pass's rows, as kernels read them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Angles:
    """Row i is rotated by cos[index[i]] and sin[index[i]].

    cos, sin: [positions, head_dim / 2] float32, contiguous.
    index: [rows] int64.
    """

    cos: Tensor
    sin: Tensor
    index: Tensor
