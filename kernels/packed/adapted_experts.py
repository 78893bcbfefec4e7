"""Experts with packed weights and LoRA adapters: gate and up projections, the adapters' part, the activation, and the
same for down projections."""

import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.experts.adapted.grouped import weighted_sum
from aerie.kernels.experts.adapted.product import ExpertAdapters, ExpertBlocks, blocks_by_expert
from aerie.kernels.experts.grouped import check_experts, local_expert_ids
from aerie.kernels.experts.route import RouterLogits
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.packed.experts import PackedExpertWeights, unserved
from aerie.kernels.packed.weight import PackedWeight, dequantize


def _check(
    x: Tensor,
    router: RouterLogits,
    weights: PackedExpertWeights,
    adapters: ExpertAdapters,
    options: GEMMOptions,
    out: Tensor | None = None,
) -> None:
    check_experts(x, router, weights.size, x.dtype, None, out)


def _served(
    x: Tensor,
    router: RouterLogits,
    weights: PackedExpertWeights,
    adapters: ExpertAdapters,
    options: GEMMOptions,
    out: Tensor | None = None,
) -> bool:
    return options.workspace is not None and unserved(weights, x.dtype) is None


@operation(
    Implementation(
        "triton", "aerie.kernels.packed.adapted_experts_triton:packed_adapted_experts", on_gpu, _served, "16 bits"
    ),
    contract=_check,
)
def packed_adapted_experts(
    x: Tensor,
    router: RouterLogits,
    weights: PackedExpertWeights,
    adapters: ExpertAdapters,
    options: GEMMOptions,
    out: Tensor | None = None,
) -> Tensor:
    """Return `packed_expert_products` with each row's adapters: [rows, size] in x's dtype. Weights without padding.

    The reference dequantises one expert at a time, with device syncs.
    """
    assert not weights.is_raised, "kernels serve these"
    chosen, weight = router.choose()
    if weights.held is not None:
        chosen = local_expert_ids(chosen, weights.held)

    def products(x: Tensor, blocks: ExpertBlocks, matrix: PackedWeight, biases: Tensor | None) -> Tensor:
        result, owners = x.new_zeros(x.shape[0], matrix.out_features), blocks.expert_of_cell()
        for expert in set(owners.tolist()) - {-1}:
            cells = (owners == expert).nonzero().flatten()
            bias = None if biases is None else biases[expert].to(x.dtype)
            result[cells] = F.linear(x[cells], dequantize(matrix.expert(expert), x.dtype), bias)
        return result

    result = weighted_sum(
        x,
        blocks_by_expert(chosen, weights.num_experts, 1),
        weight,
        lambda x, blocks: products(x, blocks, weights.gate_up, weights.gate_up_bias),
        lambda x, blocks: products(x, blocks, weights.down, weights.down_bias),
        adapters,
        weights.activation,
    )
    return result if out is None else out.copy_(result)
