"""RMSNorm (arXiv 1910.07467), alone or with the residual addition; the input of an EAGLE-3 layer (arXiv 2503.01840),
the concatenated norms of embedding and feature; activations of gated MLPs; gates of attention and of shared experts."""

import torch
import torch.nn.functional as F
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


def _check(ids: Tensor, table: Tensor, hidden: Tensor, table_weight: Tensor, hidden_weight: Tensor, eps: float) -> None:
    assert ids.shape == hidden.shape[:1] and ids.dtype == torch.int64 and ids.is_contiguous()
    for tensor in (table, hidden, table_weight, hidden_weight):
        assert tensor.shape[-1] == table.shape[1] and tensor.dtype == table.dtype and tensor.is_contiguous()


@operation(Implementation("triton", "aerie.kernels.norm.norm_triton:head_input", on_gpu), contract=_check)
def head_input(
    ids: Tensor, table: Tensor, hidden: Tensor, table_weight: Tensor, hidden_weight: Tensor, eps: float
) -> Tensor:
    """Return RMSNorm(table[ids]) and RMSNorm(hidden), concatenated.

    ids            [rows] int64
    table          [vocabulary, size], the embedding, in the model's dtype
    hidden         [rows, size], as table
    table_weight   [size], as table
    hidden_weight  [size], as table
    ->             [rows, 2 * size], as table; all arguments are contiguous
    """
    inputs = (table[ids], table_weight), (hidden, hidden_weight)
    return torch.cat([rms_norm.reference(x, weight, eps) for x, weight in inputs], dim=-1)


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


@operation(Implementation("triton", "aerie.kernels.norm.norm_triton:sigmoid_mul", on_gpu), contract=_check_sigmoid)
def sigmoid_mul(x: Tensor, gate: Tensor, added: Tensor | None = None) -> Tensor:
    """Return x * sigmoid(gate) + added. Sigmoid and product are rounded to x's dtype.

    x      [rows, heads, size], contiguous
    gate   [rows, heads, size], last stride 1, or [rows, heads, 1]; of x's dtype
    added  as x, or None
    ->     as x
    """
    gated = x * torch.sigmoid(gate)
    return gated if added is None else added + gated
