"""The weighted sum of each row's experts in torch: the reference, also used if the fused kernels do not fit, and the
contract that all implementations share."""

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.capability import ALIGNED_BYTES
from aerie.kernels.experts.gated import SWIGLU, GatedActivation
from aerie.kernels.experts.route import MAX_LISTED, RouterLogits
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.norm.norm import silu_mul
from aerie.kernels.span import Span

Biases = tuple[Tensor, Tensor]  # gate_up [experts, 2 * width], down [experts, size]


def check_experts(
    x: Tensor | Fp8Rows,
    router: RouterLogits,
    size: int,
    dtype: torch.dtype,
    inputs: Fp8Inputs | None,
    out: Tensor | None,
) -> None:
    """Assert what kernels require of the inputs of experts.

    x: [rows, size] of `dtype`, contiguous and aligned to 16 bytes; or in FP8 as `inputs`,
        if there is one, with scales of any strides beyond MAX_LISTED rows.
    router: logits of the same rows.
    out: [rows, size] of `dtype`, contiguous; None: allocated.
    """
    if isinstance(x, Tensor):
        rows = x.shape[0]
        assert x.shape == (rows, size) and x.dtype == dtype and x.is_contiguous(), "x: [rows, size], contiguous"
        assert x.data_ptr() % ALIGNED_BYTES == 0, "x is aligned to 16 bytes"
    else:
        assert inputs is not None, "experts take no FP8 rows"
        inputs.check(x, size, MAX_LISTED)
        rows = x.values.shape[0]
    router.check(rows)
    assert out is None or (out.shape == (rows, size) and out.dtype == dtype and out.is_contiguous()), "out"


def local_expert_ids(chosen: Tensor, held: Span) -> Tensor:
    """Map the model's expert indexes to this rank's. Experts of other ranks become `held.size`."""
    is_here = (chosen >= held.first) & (chosen < held.end)
    return torch.where(is_here, chosen - held.first, held.size)


def grouped_experts(
    x: Tensor,
    chosen: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    partly: bool = False,
    activation: GatedActivation = SWIGLU,
    biases: Biases | None = None,
) -> Tensor:
    """Return the weighted sum of experts: sort rows by expert, then two grouped GEMMs.

    x: [rows, size].
    chosen: [rows, k] experts of each row, any integer dtype.
    weight: [rows, k] float32, their routing weights.
    gate_up, down: [experts, 2 * width, size] and [experts, size, width].
    partly: whether `chosen` may have the index `experts`, one after the last, which contributes nothing
        (`local_expert_ids`).
    activation: of gate and up.
    biases: [experts, 2 * width] and [experts, size].

    In bfloat16 on compute capability 9.0 there is no device sync. Otherwise torch 2.13 multiplies expert by expert and
    reads the row counts on the host.
    """
    num_rows, k = chosen.shape
    experts, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    inner = F.grouped_mm(x.index_select(0, order // k), gate_up.transpose(1, 2), offs=ends)
    biased = experts.clamp_max(gate_up.shape[0] - 1)  # index in `biases`; of a row without an expert, any
    if biases is not None:
        inner = inner + biases[0].index_select(0, biased)
    outputs = F.grouped_mm(_activated(inner, activation), down.transpose(1, 2), offs=ends)
    if biases is not None:
        outputs = outputs + biases[1].index_select(0, biased)
    by_row = torch.empty_like(outputs).index_copy_(0, order, outputs).view(num_rows, k, -1)
    if partly:  # rows without an expert are uninitialised
        by_row = by_row.masked_fill((chosen == gate_up.shape[0]).unsqueeze(-1), 0.0)
    return (by_row.float() * weight.unsqueeze(-1)).sum(1).to(x.dtype)


def experts_one_by_one(
    x: Tensor,
    chosen: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: GatedActivation = SWIGLU,
    biases: Biases | None = None,
) -> Tensor:
    """`grouped_experts` for weights of any size: every row through every expert."""
    out = x.new_zeros(x.shape, dtype=torch.float32)
    for expert in range(gate_up.shape[0]):
        mine = chosen == expert
        inner_bias, bias = (None, None) if biases is None else (biases[0][expert], biases[1][expert])
        inner = F.linear(x, gate_up[expert], inner_bias)
        part = F.linear(_activated(inner, activation), down[expert], bias).float()
        share = torch.where(mine, weight, 0.0).sum(-1, keepdim=True)
        out += torch.where(mine.any(-1, keepdim=True), part * share, 0.0)
    return out.to(x.dtype)


def _activated(inner: Tensor, activation: GatedActivation) -> Tensor:
    """Apply the activation to inner [rows, 2 * width]: gate, then up."""
    return silu_mul(inner) if activation == SWIGLU else activation(*inner.chunk(2, -1))
