"""Fused experts: kernels that read only the weights of used experts.

A layer calls `build_experts` once if `fuses` is true. There is nothing else to choose: `fuses` decides before, because
the weights are laid out for the kernels. Otherwise the layer calls the reference,
`aerie.kernels.experts.grouped.grouped_experts`.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from aerie.kernels.experts.adapted.product import ExpertAdapters
from aerie.kernels.experts.route import RouterLogits
from aerie.kernels.experts.weights import ExpertSizes, ExpertWeights, fits_blocks, fits_kernels, workspace_size
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.gemm.blocks import largest
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.lazy_import import load
from aerie.kernels.span import Span

MAX_VARIANT_ROWS = 8192  # rows of a long prompt's chunk; larger chunks use the same tiles


class FusedExperts(ABC):
    """The fused experts of one layer."""

    @property
    @abstractmethod
    def inputs(self) -> Fp8Inputs | None:
        """The FP8 format that `multiply` accepts besides the model's dtype; None without FP8 weights."""

    @abstractmethod
    def without_shared(self) -> "FusedExperts":
        """Return the routed experts alone, with the same weights."""

    @abstractmethod
    def variant_rows(self, slots: int) -> list[int]:
        """Return numbers of rows that launch all variants of the kernels, for up to `MAX_VARIANT_ROWS` rows. slots:
        experts of a row, including shared ones."""

    @abstractmethod
    def multiply_adapted(self, x: Tensor, router: RouterLogits, adapters: ExpertAdapters, out: Tensor | None) -> Tensor:
        """Return `multiply` of the routed experts with each row's adapters. x: in the model's dtype."""

    @abstractmethod
    def multiply(self, x: Tensor | Fp8Rows, router: RouterLogits, out: Tensor | None) -> Tensor:
        """Return this rank's part of the weighted sum of each row's experts, including shared ones; zeros for padding
        rows.

        x       [rows, size] in the model's dtype, or in the format `inputs`
        router  logits of the same rows
        out     [rows, size], written; None allocates it
        ->      [rows, size]
        """


def fuses(size: int, width: int, options: GEMMOptions, is_plain: bool = True, in_fp8: bool = False) -> bool:
    """Return whether the kernels are used for experts of this input `size` and `width` per rank. They need tensor maps,
    so only devices with FP8 run them.

    is_plain: SwiGLU without biases. Otherwise, and for widths that 128 does not divide, only deterministic engines use
        the kernels, without those of few rows.
    in_fp8: dtype of the weights.
    """
    if options.workspace is None or not options.fp8:
        return False
    return is_plain and fits_kernels(size, width) or options.deterministic and not in_fp8 and fits_blocks(size, width)


def build_experts(weights: ExpertWeights, options: GEMMOptions, dtype: torch.dtype) -> FusedExperts:
    """Return the fused experts of a layer.

    weights: final.
    options: `fuses` is true for them.
    dtype: dtype of results.
    """
    assert options.workspace is not None, "options.fp8 implies a workspace"
    build = load("aerie.kernels.experts.fused_triton:TritonExperts")
    made: FusedExperts = build(weights, options.workspace, options.deterministic, dtype)
    return made


def fused_workspace_size(held: Span, num_shared: int, experts_per_token: int, size: int, width: int) -> tuple[int, int]:
    """Return float32 cells and tickets of a `Workspace` for weights of any dtype, with or without joined shared
    experts.

    held: the routed experts on this rank.
    """
    if not fits_kernels(size, width):
        return 0, held.size + num_shared
    return largest(
        workspace_size(
            ExpertSizes(
                held.size,
                shared,
                experts_per_token=experts_per_token,
                size=size,
                width=width,
                step=step,
                num_elsewhere=held.total - held.size,
            )
        )
        for shared in {0, num_shared}
        for step in (64, 128)
    )
