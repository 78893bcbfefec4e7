"""Routed experts with low-bit weights (`aerie.kernels.packed.weight`)."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from aerie.kernels.capability import num_multiprocessors
from aerie.kernels.experts.gated import SWIGLU, GatedActivation
from aerie.kernels.experts.grouped import check_experts, local_expert_ids
from aerie.kernels.experts.route import RouterLogits
from aerie.kernels.experts.weights import ExpertSizes
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.operation import Implementation, on_gpu, operation
from aerie.kernels.packed.cuda.gated_mlp_tiles import EXPERT_GROUP, one_row_tiles
from aerie.kernels.packed.weight import TILE, PackedWeight, dequantize
from aerie.kernels.span import Span


@dataclass(frozen=True)
class PackedExpertWeights:
    """The routed experts of a layer on this rank.

    gate_up: [experts, 2 * width, size], gate rows, then up rows; width is a multiple of 64.
    down: [experts, size, width]; its `row_scale`, if any, is one number per expert.
    gate_up_bias, down_bias: float32 [experts, 2 * width] and [experts, size], or None.
    held: the experts on this rank; None: all.
    is_raised: whether scales are multiplied, see `with_raised_scales`.
    has_moved_bits: whether the bits of codes are in the order of `with_moved_bits`, which decodes faster.
    """

    gate_up: PackedWeight
    down: PackedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: GatedActivation = SWIGLU
    held: Span | None = None
    is_raised: bool = False
    has_moved_bits: bool = False

    @cached_property
    def down_scale(self) -> Tensor | None:
        """The scale of each expert's whole down projection, float32 [experts]; None without."""
        scale = self.down.row_scale
        return None if scale is None else scale[:, 0].contiguous()

    def sizes(self, slots: int) -> ExpertSizes:
        """Return the sizes. slots: experts per row."""
        elsewhere = 0 if self.held is None else self.held.total - self.num_experts
        return ExpertSizes(
            self.num_experts,
            0,
            experts_per_token=slots,
            size=self.size,
            width=self.width,
            step=TILE,
            num_elsewhere=elsewhere,
        )

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


def with_raised_scales(weights: PackedExpertWeights) -> PackedExpertWeights:
    """Return the weights as kernels need them. Only e2m1 (FP4) weights change.

    `decode_ptx` puts the bits of a code where bfloat16 has exponent and mantissa, which gives its value times 2^-126,
    and saves a multiplication per weight. Instead scales are multiplied by 2^110 here, and sums by 2^16 in the kernels.
    Powers of two are exact; with 2^126, scales of 4 or more would overflow.

    Raises ValueError for scales that would overflow, which no published model has.
    """
    if weights.gate_up.code != "e2m1" or weights.is_raised:
        return weights
    matrices = []
    for weight in (weights.gate_up, weights.down):
        scales = weight.scales * 2.0**110
        if not bool(torch.isfinite(scales).all()):
            raise ValueError("scales of 4-bit floats are 2^17 or more; use the checkpoint in bf16")
        matrices.append(replace(weight, scales=scales))
    has_moved_bits = weights.gate_up.group % 32 == 0
    if has_moved_bits:
        matrices = [replace(weight, codes=with_moved_bits(weight.codes)) for weight in matrices]
    return replace(weights, gate_up=matrices[0], down=matrices[1], is_raised=True, has_moved_bits=has_moved_bits)


def with_moved_bits(codes: Tensor) -> Tensor:
    """Return e2m1 codes in a bit order that `decode_ptx` decodes in fewer instructions.

    codes: [experts, ...] int32 words. Each half has four codes: sign, exponent, mantissa from bits 3, 7, 11 and 15
        down. In the result, exponents and mantissas are at bits 8, 5, 2 and 11 down, signs at bits 15, 12, 14, 13.
    """
    placed = torch.zeros_like(codes)
    for words, out in zip(codes, placed, strict=True):  # one expert at a time bounds scratch memory
        for r, (first, sign) in enumerate(((6, 15), (3, 12), (0, 14), (9, 13))):
            shifted = words >> (4 * r)
            out |= ((shifted & 0x00070007) << first) | (((shifted >> 3) & 0x00010001) << sign)
    return placed


def _serves(
    x: Tensor, router: RouterLogits, weights: PackedExpertWeights, options: GEMMOptions, out: Tensor | None = None
) -> bool:
    """Return whether the Triton kernels support a call. Arguments: `packed_expert_products`."""
    return options.workspace is not None and unserved(weights, x.dtype) is None


def _one_row_serves(
    x: Tensor, router: RouterLogits, weights: PackedExpertWeights, options: GEMMOptions, out: Tensor | None = None
) -> bool:
    """Return whether the kernel for one row (`one_row_experts.cu`) supports a call: MXFP4 weights whose tiles fit in
    shared memory, and the options' workspace is large enough. Arguments: `packed_expert_products`."""
    if (
        not _serves(x, router, weights, options)
        or x.shape[0] != 1
        or options.deterministic
        or not weights.has_moved_bits
    ):
        return False
    is_aligned = x.is_contiguous() and x.data_ptr() % 16 == 0
    if weights.gate_up.group != EXPERT_GROUP or not is_aligned or (out is not None and out.dtype != x.dtype):
        return False
    if weights.gate_up.row_scale is not None or weights.down.row_scale is not None:
        return False
    tiles = one_row_tiles(weights.sizes(router.routing.experts_per_token), num_multiprocessors(x.device))
    workspace = options.workspace
    if tiles is None or workspace is None:
        return False
    cells, tickets = tiles.workspace
    return workspace.part.numel() >= cells and workspace.tickets.numel() >= tickets


def unserved(weights: PackedExpertWeights, dtype: torch.dtype) -> str | None:
    """Return why the kernels do not support these weights; None if they do."""
    if dtype != torch.bfloat16:
        return f"inputs are {dtype}"
    scales = weights.gate_up.scales.dtype
    if scales == torch.float32 or (weights.gate_up.code == "e2m1" and scales != torch.bfloat16):
        return f"{weights.gate_up.code} with scales in {scales}"
    return None


def _check(
    x: Tensor, router: RouterLogits, weights: PackedExpertWeights, options: GEMMOptions, out: Tensor | None = None
) -> None:
    check_experts(x, router, weights.size, x.dtype, None, out)


@operation(
    Implementation(
        "cuda",
        "aerie.kernels.packed.cuda.gated_mlp_cuda:packed_expert_products",
        lambda device: device.compiles_cuda,
        _one_row_serves,
        "one row, MXFP4",
    ),
    Implementation("triton", "aerie.kernels.packed.experts_triton:packed_expert_products", on_gpu, _serves),
    contract=_check,
)
def packed_expert_products(
    x: Tensor, router: RouterLogits, weights: PackedExpertWeights, options: GEMMOptions, out: Tensor | None = None
) -> Tensor:
    """Return this rank's part of the weighted sum of each row's experts: [rows, size] in x's dtype.

    x: [rows, size] bfloat16, float16 or float32, contiguous.
    router: logits of the same rows.
    out: contiguous memory for the result; None allocates it.

    The reference dequantises one expert at a time, with device syncs.
    """
    assert not weights.is_raised, "kernels serve these"
    chosen, weight = router.choose()
    if weights.held is not None:
        chosen = local_expert_ids(chosen, weights.held)
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
