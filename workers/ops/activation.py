"""Activations of gated MLPs."""

import torch.nn.functional as F
from torch import Tensor

from attention.ops.operation import Implementation, on_gpu, operation


@operation(Implementation("triton", "workers.ops.norm_triton:silu_mul", on_gpu))
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    gate_up  [rows, 2 * size]: gate, then up
    ->       [rows, size], in gate_up's type
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
