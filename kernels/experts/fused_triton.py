"""The Triton implementation of `aerie.kernels.experts.fused`: chooses kernels by the number of rows."""

import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aerie.kernels.experts.adapted.product import ExpertAdapters
from aerie.kernels.experts.adapted.sorted_rows_triton import adapted_row_experts, adapted_row_tiles
from aerie.kernels.experts.few_rows_triton import few_row_experts
from aerie.kernels.experts.fused import MAX_VARIANT_ROWS, FusedExperts
from aerie.kernels.experts.many_rows_triton import many_row_experts, many_row_tiles
from aerie.kernels.experts.ordered.ordered_rows_triton import fits_ordered_rows, ordered_row_experts
from aerie.kernels.experts.route import RouterLogits
from aerie.kernels.experts.route_triton import route
from aerie.kernels.experts.weights import MAX_FEW_ROWS, ExpertWeights, few_row_tiles
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.fp8.rows_triton import quantize_rows
from aerie.kernels.gemm.workspace import Workspace


@dataclass(frozen=True)
class TritonExperts(FusedExperts):
    """Fused experts in Triton.

    deterministic: a row's result must not depend on other rows.
    dtype: dtype of results.
    """

    weights: ExpertWeights
    workspace: Workspace
    deterministic: bool
    dtype: torch.dtype

    @property
    def inputs(self) -> Fp8Inputs | None:
        return Fp8Inputs(self.weights.by_group, sys.maxsize, plain=True) if self.weights.in_fp8 else None

    def without_shared(self) -> "TritonExperts":
        return replace(self, weights=self.weights.without_shared())

    def variant_rows(self, slots: int) -> list[int]:
        sizes, found = self.weights.sizes(slots), dict[object, int]()
        for rows in (*range(1, MAX_FEW_ROWS + 1), *range(MAX_FEW_ROWS + 1, MAX_VARIANT_ROWS + 1, MAX_FEW_ROWS)):
            is_few = rows <= MAX_FEW_ROWS
            tiles = few_row_tiles(rows, sizes) if is_few else many_row_tiles(rows, sizes, self.deterministic)
            found.setdefault((is_few, tiles), rows)
        return list(found.values())

    def multiply_adapted(self, x: Tensor, router: RouterLogits, adapters: ExpertAdapters, out: Tensor | None) -> Tensor:
        weights = self.weights.without_shared()
        if out is None:
            out = torch.empty((x.shape[0], weights.size), dtype=self.dtype, device=x.device)
        routed = route(router, 0, self.workspace.tickets, False, weights.held)
        tiles = adapted_row_tiles(x.shape[0], weights.sizes(routed.chosen.shape[1]))
        return adapted_row_experts(x, routed, weights, adapters, tiles, out)

    def multiply(self, x: Tensor | Fp8Rows, router: RouterLogits, out: Tensor | None) -> Tensor:
        weights = self.weights
        if isinstance(x, Tensor) and weights.in_fp8:
            x = quantize_rows(x, weights.by_group)
        rows = router.values.shape[-2]
        if out is None:
            out = torch.empty((rows, weights.size), dtype=self.dtype, device=router.values.device)
        lists = not self.deterministic or fits_ordered_rows(weights)
        routed = route(router, weights.num_shared, self.workspace.tickets, lists, weights.held, self.deterministic)
        slots = routed.chosen.shape[1]
        if routed.used is not None and self.deterministic:
            return ordered_row_experts(x, routed, weights, self.workspace, out)
        if routed.used is not None:
            tiles = few_row_tiles(rows, weights.sizes(slots))
            return few_row_experts(x, routed, weights, self.workspace, tiles, out)
        tiles = many_row_tiles(rows, weights.sizes(slots), self.deterministic)
        return many_row_experts(x, routed, weights, tiles, out)
