"""Rotary position embedding (arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints, in torch: what
layouts do on CPUs, and what the kernel `attention.kernels.rope_store` is compared with."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, heads, head_dim] turned by its rows' angles cos, sin [rows, head_dim / 2] float32; same shape and
    dtype."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
