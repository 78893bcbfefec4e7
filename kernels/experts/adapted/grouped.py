"""The weighted sum of each row's experts with LoRA adapters, in torch: gate and up projections, the adapters' part, the
activation, and the same for down projections. Reads nothing on the host in bfloat16 on compute capability 9.0
(`aerie.kernels.experts.grouped.grouped_experts`)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.capability import ALIGNED_BYTES
from aerie.kernels.experts.adapted.product import ExpertAdapters, ExpertBlocks, add_expert_lora, blocks_by_expert
from aerie.kernels.experts.gated import SWIGLU, GatedActivation
from aerie.kernels.experts.grouped import Biases
from aerie.kernels.norm.norm import silu_mul

Product = Callable[[Tensor, ExpertBlocks], Tensor]
"""Inputs [cells, in_features] and their blocks -> each cell's product with its expert: [cells, out_features]."""
CELLS_OF_BLOCK = 16  # on GPUs; the smallest tile of a tensor core


def adapted_experts(
    x: Tensor,
    chosen: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    adapters: ExpertAdapters,
    block_m: int,
    activation: GatedActivation = SWIGLU,
    biases: Biases | None = None,
) -> Tensor:
    """Return the weighted sum of experts with each row's adapter: [rows, size] in x's dtype.

    x: [rows, size].
    chosen: [rows, k] experts of each row, any integer dtype; those outside 0 .. experts - 1 contribute nothing.
    weight: [rows, k] float32, their routing weights.
    gate_up, down: [experts, 2 * width, size] and [experts, size, width], in x's dtype; experts beyond the tables of
        `adapters`, such as shared ones, have no adapters.
    block_m: cells of a block: 1 on CPUs, on GPUs CELLS_OF_BLOCK.
    activation: of gate and up.
    biases: [experts, 2 * width] and [experts, size].
    """
    aligned = all(matrix.shape[2] * matrix.element_size() % ALIGNED_BYTES == 0 for matrix in (gate_up, down))
    first, second = (None, None) if biases is None else biases

    def gates(x: Tensor, blocks: ExpertBlocks) -> Tensor:
        return _products(x, gate_up, blocks, aligned, first)

    def downs(x: Tensor, blocks: ExpertBlocks) -> Tensor:
        return _products(x, down, blocks, aligned, second)

    blocks = blocks_by_expert(chosen, gate_up.shape[0], block_m)
    return weighted_sum(x, blocks, weight, gates, downs, adapters, activation)


def weighted_sum(
    x: Tensor,
    blocks: ExpertBlocks,
    weight: Tensor,
    gates: Product,
    downs: Product,
    adapters: ExpertAdapters,
    activation: GatedActivation,
) -> Tensor:
    """Return `adapted_experts` of other products. gates, downs: see `Product`."""
    num_rows, slots = weight.shape
    used, pair = blocks.pairs >= 0, blocks.pairs.clamp_min(0).long()
    inner = gates(x.index_select(0, pair // slots), blocks)
    add_expert_lora(inner, x, adapters.gate_up, blocks, adapters.lora_indices)
    hidden = silu_mul(inner) if activation == SWIGLU else activation(*inner.chunk(2, -1))
    outputs = downs(hidden, blocks).float() * weight.flatten()[pair, None]
    parts = x.new_zeros(num_rows * slots + 1, outputs.shape[1])  # the last one for unused cells
    parts.index_copy_(0, torch.where(used, pair, num_rows * slots), outputs.to(x.dtype))
    add_expert_lora(parts[:-1], hidden, adapters.down, blocks, adapters.lora_indices, weight.contiguous())
    return parts[:-1].view(num_rows, slots, -1).float().sum(1).to(x.dtype)


def _products(x: Tensor, weights: Tensor, blocks: ExpertBlocks, aligned: bool, bias: Tensor | None) -> Tensor:
    """Return the product of each cell's row of x with its expert's matrix: [cells, out_features]. Results of unused
    cells are undefined. aligned: whether torch's grouped GEMM accepts the weights' rows."""
    expert, num_experts = blocks.expert_of_cell(), weights.shape[0]
    if aligned:
        numbers = torch.arange(num_experts, device=x.device, dtype=torch.int32)
        of_block = torch.where(blocks.experts < 0, num_experts, blocks.experts)
        ends = torch.searchsorted(of_block, numbers, right=True, out_int32=True) * blocks.block_m
        outputs = F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    else:
        outputs = x.new_zeros(x.shape[0], weights.shape[1])
        for number in range(num_experts):
            outputs = torch.where((expert == number)[:, None], F.linear(x, weights[number]), outputs)
    return outputs if bias is None else outputs + bias.to(x.dtype).index_select(0, expert.clamp_min(0))
