"""The weighted sum of each row's experts, by kernels that read the weights of used experts alone.

Chosen once for each layer by `choose_experts`, where `fuses`; the reference, and what runs elsewhere, is
`workers.layers.experts.grouped_experts`.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from attention.ops.operation import Implementation
from workers.ops.experts.route import RouterLogits
from workers.ops.experts.weights import ExpertSizes, ExpertWeights, fits_kernels, workspace_size
from workers.ops.fp8.rows import Fp8Inputs, Fp8Rows
from workers.ops.gemm.workspace import GEMMOptions
from workers.span import Span


class FusedExperts(ABC):
    """The experts of one layer."""

    @property
    @abstractmethod
    def inputs(self) -> Fp8Inputs | None:
        """The form of FP8 in which `multiply` takes rows beside the model's type; None where weights are not FP8."""

    @abstractmethod
    def multiply(self, x: Tensor | Fp8Rows, router: RouterLogits, out: Tensor | None) -> Tensor:
        """This rank's part of the weighted sum of each row's experts, shared ones included.

        x       [rows, size] of the model's type, or in FP8 as `inputs` says
        router  of the same rows
        out     [rows, size], written if it is given
        ->      [rows, size]; zeros for padding rows
        """


EXPERTS = Implementation("triton", "workers.ops.experts.fused_triton:TritonExperts", lambda here: here.multiplies_fp8)


def fuses(size: int, width: int, options: GEMMOptions) -> bool:
    """Whether the kernels multiply by experts of `width` on a rank, whose rows have `size` columns. They need tensor
    maps, which the devices that multiply FP8 have."""
    return options.workspace is not None and options.fp8 and fits_kernels(size, width)


def choose_experts(weights: ExpertWeights, options: GEMMOptions, dtype: torch.dtype) -> FusedExperts:
    """weights: final. options: where `fuses`. dtype: of results."""
    assert options.workspace is not None, "comes with fp8"
    made: FusedExperts = EXPERTS.function(weights, options.workspace, options.deterministic, dtype)
    return made


def fused_workspace_size(held: Span, num_shared: int, experts_per_token: int, size: int, width: int) -> tuple[int, int]:
    """Float32 cells and tickets of a `Workspace` for weights of any type, shared experts joined or not. held: of the
    experts that rows are routed to."""
    if not fits_kernels(size, width):
        return 0, 0
    sizes = [
        workspace_size(ExpertSizes(held.size, shared, experts_per_token, size, width, step, held.total - held.size))
        for shared in {0, num_shared}
        for step in (64, 128)
    ]
    return max(cells for cells, _ in sizes), max(tickets for _, tickets in sizes)
