"""Activations of gated MLPs."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [rows, size] of both side by side [rows, 2 * size]."""
    if gate_up.is_cuda:
        from workers.layers.kernels.norm_activation import silu_mul as fused

        return fused(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
