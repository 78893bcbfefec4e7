"""Activations of gated MLPs, and gates of attention and of shared experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.cpp_library import compiles
from aerie.kernels.operation import Implementation, on_gpu, operation


def _check_gate_up(gate_up: Tensor) -> None:
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0 and gate_up.is_contiguous()


def _check_sigmoid(x: Tensor, gate: Tensor, added: Tensor | None = None) -> None:
    assert x.is_contiguous() and gate.shape[:2] == x.shape[:2] and gate.shape[2] in (1, x.shape[2])
    assert gate.dtype == x.dtype and (gate.stride(2) == 1 or gate.shape[2] == 1)
    assert added is None or (added.is_contiguous() and added.shape == x.shape and added.dtype == x.dtype)


@operation(
    Implementation("triton", "aerie.kernels.norm.norm_triton:silu_mul", on_gpu),
    Implementation(
        "c++",
        "aerie.kernels.norm.norm_cpp:silu_mul",
        compiles,
        lambda gate_up: gate_up.dtype == torch.float32 and gate_up.is_contiguous(),
        "float32",
    ),
    contract=_check_gate_up,
)
def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up.

    gate_up  [rows, 2 * size], contiguous: gate, then up
    ->       [rows, size], in gate_up's dtype
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@operation(Implementation("triton", "aerie.kernels.norm.norm_triton:gelu_mul", on_gpu), contract=_check_gate_up)
def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, with the tanh approximation (arXiv 1606.08415, section 2), rounded before the product.

    gate_up  [rows, 2 * size], contiguous: gate, then up
    ->       [rows, size], in gate_up's dtype
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


ACTIVATIONS = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_mul}
"""Activations of gated MLPs, by their names in config.json."""


@operation(Implementation("triton", "aerie.kernels.norm.gate_triton:sigmoid_mul", on_gpu), contract=_check_sigmoid)
def sigmoid_mul(x: Tensor, gate: Tensor, added: Tensor | None = None) -> Tensor:
    """Return x * sigmoid(gate) + added. Sigmoid and product are rounded to x's dtype.

    x      [rows, heads, size], contiguous
    gate   [rows, heads, size], last stride 1, or [rows, heads, 1]; of x's dtype
    added  as x, or None
    ->     as x
    """
    gated = x * torch.sigmoid(gate)
    return gated if added is None else added + gated
