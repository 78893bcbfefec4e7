"""Experts by kernels of ours, on GPUs: which of them multiply how many rows. Called by `workers.layers.experts` and
`workers.quantization.fp8_experts`; importing it needs no triton."""

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.layers.gemm import GEMMOptions
from workers.ops.experts.route import RouterLogits
from workers.ops.fp8.rows import Fp8Inputs, Fp8Rows
from workers.span import Span

if TYPE_CHECKING:
    from workers.ops.experts.weights import ExpertWeights
    from workers.ops.gemm.skinny_triton import Workspace


def fuses(size: int, width: int, options: GEMMOptions) -> bool:
    """Whether the kernels multiply by experts of `width` on a rank, whose rows have `size` numbers."""
    if options.workspace is None or not options.fp8:  # they need tensor maps too, which the same devices have
        return False
    from workers.ops.experts.weights import fits_kernels

    return fits_kernels(size, width)


def workspace_size(held: Span, num_shared: int, experts_per_token: int, size: int, width: int) -> tuple[int, int]:
    """Float32 cells and tickets of a `Workspace` for weights of any type, shared experts joined or not. held: of the
    experts that rows are routed to."""
    from workers.ops.experts.weights import ExpertSizes, fits_kernels, workspace_size

    if not fits_kernels(size, width):
        return 0, 0
    sizes = [
        workspace_size(
            ExpertSizes(held.size, shared, experts_per_token, size, width, step, held.total - held.size),
        )
        for shared in {0, num_shared}
        for step in (64, 128)
    ]
    return max(cells for cells, _ in sizes), max(tickets for _, tickets in sizes)


def with_shared(experts: Tensor, shared: Tensor) -> Tensor:
    """[experts + shared ones, rows, columns]: `experts`, and after them `shared`. Weights, or their scales."""
    joined = with_room(experts, shared.shape[0])
    joined[experts.shape[0] :].copy_(shared)
    return joined


def with_room(experts: Tensor, num_shared: int) -> Tensor:
    """[experts + num_shared, rows, columns] whose first are `experts`, where they lie if there is room behind them.
    Tensors that grew once all layers are loaded would leave holes in memory, of DeepSeek-V3 a third of its weights."""
    whole = (experts.shape[0] + num_shared, *experts.shape[1:])
    end = experts.storage_offset() + math.prod(whole)
    if experts.is_contiguous() and end * experts.itemsize <= experts.untyped_storage().nbytes():
        return experts.as_strided(whole, experts.stride())
    grown = experts.new_empty(whole)
    grown[: experts.shape[0]].copy_(experts)
    return grown


def shared_rows(mlp: Tensor, num_shared: int) -> Tensor:
    """[num_shared, rows, columns], gates above what they gate: the experts that `mlp` [num_shared * rows, columns], all
    gates above all that they gate, is together. Weights, or their scales."""
    return mlp.view(2, num_shared, -1, mlp.shape[1]).transpose(0, 1).flatten(1, 2)


def shared_columns(mlp: Tensor, num_shared: int) -> Tensor:
    """The same of down-projections: mlp [rows, num_shared * columns]; or [rows, 1] for scales of whole rows."""
    is_whole = mlp.shape[1] == 1
    each = mlp.unsqueeze(1).expand(-1, num_shared, -1) if is_whole else mlp.view(mlp.shape[0], num_shared, -1)
    return each.transpose(0, 1)


@dataclass(frozen=True)
class FusedExperts:
    """deterministic: a row's result must not depend on the rows beside it. dtype: of results."""

    weights: "ExpertWeights"
    workspace: "Workspace"
    deterministic: bool
    dtype: torch.dtype

    @property
    def inputs(self) -> Fp8Inputs | None:
        """Rows in FP8, and in the model's type for the router; None where weights are in the latter."""
        return Fp8Inputs(self.weights.by_group, sys.maxsize, plain=True) if self.weights.in_fp8 else None

    def multiply(self, x: Tensor | Fp8Rows, router: RouterLogits, out: Tensor | None) -> Tensor:
        """See `ExpertsMethod.multiply`; x may be in FP8 already where the weights are."""
        from workers.ops.experts.few_rows_triton import few_row_experts
        from workers.ops.experts.route_triton import route
        from workers.ops.experts.weights import few_row_tiles
        from workers.ops.fp8.rows import quantize_rows

        weights = self.weights
        if isinstance(x, Tensor) and weights.in_fp8:
            x = quantize_rows(x, weights.by_group)
        rows = router.values.shape[-2]
        if out is None:
            out = torch.empty((rows, weights.size), dtype=self.dtype, device=router.values.device)
        routed = route(router, weights.num_shared, self.workspace.tickets, not self.deterministic, weights.held)
        slots = routed.chosen.shape[1]
        if routed.used is not None:
            tiles = few_row_tiles(rows, weights.sizes(slots))
            return few_row_experts(x, routed, weights, self.workspace, tiles, out)
        from workers.ops.experts.many_rows_triton import many_row_experts, many_row_tiles

        tiles = many_row_tiles(rows, weights.sizes(slots), self.deterministic)
        return many_row_experts(x, routed, weights, tiles, out)
