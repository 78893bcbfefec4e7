"""Routed experts with weights of few bits (`workers.ops.packed.weight`)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.ops.operation import operation
from workers.ops.experts.gated import SWIGLU, GatedActivation
from workers.ops.experts.grouped import numbered_here
from workers.ops.experts.route import RouterLogits
from workers.ops.gemm.workspace import GEMMOptions
from workers.ops.packed.weight import PackedWeight, dequantize
from workers.span import Span


@dataclass(frozen=True)
class PackedExpertWeights:
    """The routed experts of a layer on this rank.

    gate_up: [experts, 2 * width, size], gate above up; width is a multiple of 64.
    down: [experts, size, width].
    gate_up_bias, down_bias: float32 [experts, 2 * width] and [experts, size], or None.
    held: the experts on this rank; None: all.
    """

    gate_up: PackedWeight
    down: PackedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: GatedActivation = SWIGLU
    held: Span | None = None

    @property
    def num_experts(self) -> int:
        assert self.gate_up.num_experts is not None, "has a leading dimension"
        return self.gate_up.num_experts

    @property
    def size(self) -> int:
        return self.down.out_features

    @property
    def width(self) -> int:
        return self.down.in_features


@operation()
def packed_expert_products(
    x: Tensor, router: RouterLogits, weights: PackedExpertWeights, options: GEMMOptions, out: Tensor | None = None
) -> Tensor:
    """Return this rank's part of the weighted sum of each row's experts: [rows, size] in x's dtype.

    x: [rows, size] bfloat16, float16 or float32, contiguous.
    router: logits of the same rows.
    out: contiguous memory for the result; None allocates it.

    The reference dequantises one expert at a time, and waits for the device.
    """
    chosen, weight = router.choose()
    if weights.held is not None:
        chosen = numbered_here(chosen, weights.held)
    total = torch.zeros((x.shape[0], weights.size), dtype=torch.float32, device=x.device)
    for expert in range(weights.num_experts):
        row, slot = torch.where(chosen == expert)
        if row.numel():
            part = expert_product(x.index_select(0, row), expert, weights)
            total.index_add_(0, row, part.float() * weight[row, slot].unsqueeze(-1))
    return total.to(x.dtype) if out is None else out.copy_(total)


def expert_product(x: Tensor, expert: int, weights: PackedExpertWeights) -> Tensor:
    """Return the output of one expert for all rows of x."""

    def product(x: Tensor, weight: PackedWeight, biases: Tensor | None) -> Tensor:
        bias = None if biases is None else biases[expert].to(x.dtype)
        return F.linear(x, dequantize(weight.expert(expert), x.dtype), bias)

    gate, up = product(x, weights.gate_up, weights.gate_up_bias).chunk(2, -1)
    return product(weights.activation(gate, up), weights.down, weights.down_bias)
