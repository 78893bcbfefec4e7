"""RMSNorm (arXiv 1910.07467)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from aerie.kernels.fp8.product import fp8_rms_norm
from aerie.kernels.fp8.rows import Fp8Inputs, Fp8Rows
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.kernels.norm.norm import add_rms_norm, rms_norm
from aerie.kernels.span import Span
from aerie.workers.distributed.tp_group import SOLO, TPGroup
from aerie.workers.layers.weighted import Vector, WeightKey


class RMSNorm(Vector):
    """x / rms(x) * weight over the last dimension, computed in float32 for 16-bit dtypes."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype | None = None) -> None:
        super().__init__("weight", Span.whole(size), dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor, group: TPGroup = SOLO) -> tuple[Tensor, Tensor]:
        """Write residual + x to `residual`. Return its norm, and `residual`.

        group: ranks whose parts of x are summed first.
        """
        normed = group.all_reduce_add_norm(x, residual, self.weight, self.eps)
        if normed is not None:
            return normed, residual
        return add_rms_norm(group.all_reduce(x), residual, self.weight, self.eps), residual

    def for_product(self, x: Tensor, wanted: Fp8Inputs | None) -> Tensor | Fp8Rows:
        """Return the norm of x [rows, size] in the FP8 format `wanted`, or in x's dtype if it is None."""
        if wanted is None:
            return self(x)  # type: ignore[no-any-return]
        x = x.contiguous()
        return fp8_rms_norm(x, None, self.weight, self.eps, wanted.empty(x))

    def add_for_product(
        self, x: Tensor, residual: Tensor, wanted: Fp8Inputs | None, group: TPGroup = SOLO
    ) -> tuple[Tensor | Fp8Rows, Tensor]:
        """`add`, with the norm in the FP8 format `wanted`. The fused all-reduce and norm returns the model's dtype,
        which every product accepts too."""
        if wanted is None:
            return self.add(x, residual, group)
        normed = group.all_reduce_add_norm(x, residual, self.weight, self.eps)
        if normed is not None:
            return normed, residual
        out = wanted.empty(x)
        return fp8_rms_norm(group.all_reduce(x), residual, self.weight, self.eps, out), residual


class UnitRMSNorm(RMSNorm):
    """RMSNorm with a weight of ones, which the checkpoint lacks."""

    def weight_keys(self) -> tuple[WeightKey, ...]:
        return ()

    def finish(self, options: GEMMOptions) -> None:
        self.weight.data.fill_(1.0)


class FullPrecisionRMSNorm(RMSNorm):
    """An RMSNorm with a float32 weight, which is multiplied before the result is rounded (Gemma 4)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps, torch.float32)


class ZeroCentredRMSNorm(FullPrecisionRMSNorm):
    """An RMSNorm whose checkpoint stores w = weight - 1 (Gemma 2 and 3, Qwen3-Next, Qwen3.5). 1 + w is stored in
    float32: bfloat16 would lose w."""

    def load(self, key: WeightKey, full: Tensor) -> None:
        super().load(key, full)
        self.weight.data.add_(1.0)


class NoNorm(RMSNorm):
    """The identity, for layers without a norm (OLMo 2). `add` returns the residual stream twice; the caller must not
    write to it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(0, eps)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor, group: TPGroup = SOLO) -> tuple[Tensor, Tensor]:
        residual += group.all_reduce(x)
        return residual, residual

    def for_product(self, x: Tensor, wanted: Fp8Inputs | None) -> Tensor:
        return x

    def add_for_product(
        self, x: Tensor, residual: Tensor, wanted: Fp8Inputs | None, group: TPGroup = SOLO
    ) -> tuple[Tensor, Tensor]:
        return self.add(x, residual, group)

    def weight_keys(self) -> tuple[WeightKey, ...]:
        return ()


class ProjectionNorm(FullPrecisionRMSNorm):
    """An RMSNorm over all heads of a projection, including those of other ranks (OLMo 2).

    heads: this rank's heads; with more ranks than heads, several ranks have the same head.
    weight: [this rank's heads * head_dim] float32.
    """

    def __init__(self, heads: Span, head_dim: int, eps: float) -> None:
        span = heads.times(head_dim)
        super().__init__(span.size, eps)
        self.span = span

    def scaled(self, x: Tensor, squares: Tensor, ranks: int) -> Tensor:
        """Return the norm of x, given the sums of squares over all ranks.

        x: [rows, heads, head_dim].
        squares: [rows] float32.
        """
        copies = ranks * self.span.size // self.span.total
        root = torch.rsqrt(squares / (copies * self.span.total) + self.eps)
        wide = x.flatten(1).float() * root.unsqueeze(1) * self.weight
        return wide.to(x.dtype).view(x.shape)


def norm_projections(norms: Sequence[ProjectionNorm], parts: Sequence[Tensor], group: TPGroup) -> list[Tensor]:
    """Normalise this rank's heads of several projections, with one all-reduce.

    parts: [rows, heads, head_dim] each.
    returns: as `parts`.
    """
    if group.size == 1:
        return [norm(part.flatten(1)).view(part.shape) for norm, part in zip(norms, parts, strict=True)]
    total = sum_in_halves if group.ordered else torch.Tensor.sum
    squares = torch.stack([total(part.float().square().flatten(1), 1) for part in parts], 1)
    sums = group.all_reduce(squares).unbind(1)
    return [
        norm.scaled(part, projection, group.size) for norm, part, projection in zip(norms, parts, sums, strict=True)
    ]


def sum_in_halves(x: Tensor, dim: int) -> Tensor:
    """Return the sum of x [rows, n] over dimension 1: [rows]. A row's sum does not depend on the number of rows, as it
    may in torch, whose kernel divides rows by their number."""
    assert x.dim() == 2 and dim == 1
    while (n := x.shape[1]) > 1:
        half = n // 2
        sums = x[:, :half] + x[:, half : 2 * half]
        x = sums if n % 2 == 0 else torch.cat((sums, x[:, -1:]), 1)
    return x.squeeze(1)
