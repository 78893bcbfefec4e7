"""RMSNorm (arXiv 1910.07467)."""

import torch
from torch import Tensor, nn

from workers.distributed.tp_group import SOLO, TPGroup
from workers.layers.linear_method import check_plain
from workers.layers.weighted import WeightedModule, WeightKey, check_shape
from workers.ops.fp8.norm import fp8_rms_norm
from workers.ops.fp8.rows import Fp8Inputs, Fp8Rows
from workers.ops.gemm.workspace import GEMMOptions
from workers.ops.norm import add_rms_norm, rms_norm


class RMSNorm(WeightedModule):
    """x / rms(x) * weight over the last dimension, computed in float32 for half types."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor, group: TPGroup = SOLO) -> tuple[Tensor, Tensor]:
        """Return the norm of residual + x, and that sum, which is written to `residual`.

        group: ranks whose parts of x are summed first.
        """
        normed = group.all_reduce_add_norm(x, residual, self.weight, self.eps)
        if normed is not None:
            return normed, residual
        return add_rms_norm(group.all_reduce(x), residual, self.weight, self.eps), residual

    def for_product(self, x: Tensor, wanted: Fp8Inputs | None) -> Tensor | Fp8Rows:
        """Return the norm of x [rows, size] in the FP8 format `wanted`; None: as `forward`."""
        if wanted is None:
            return self(x)  # type: ignore[no-any-return]
        x = x.contiguous()
        return fp8_rms_norm(x, None, self.weight, self.eps, wanted.empty(x))

    def add_for_product(
        self, x: Tensor, residual: Tensor, wanted: Fp8Inputs | None, group: TPGroup = SOLO
    ) -> tuple[Tensor | Fp8Rows, Tensor]:
        """`add`, with the norm in the FP8 format `wanted`. The fused all-reduce and norm returns the model's dtype
        instead, which every product accepts."""
        if wanted is None:
            return self.add(x, residual, group)
        normed = group.all_reduce_add_norm(x, residual, self.weight, self.eps)
        if normed is not None:
            return normed, residual
        out = wanted.empty(x)
        return fp8_rms_norm(group.all_reduce(x), residual, self.weight, self.eps, out), residual

    def weight_keys(self) -> tuple[WeightKey, ...]:
        return (WeightKey("weight"),)

    def load(self, key: WeightKey, full: Tensor) -> None:
        check_plain(full)
        check_shape(full, self.weight.shape)
        self.weight.data.copy_(full)

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.weight.data.fill_(1.0)


class FullPrecisionRMSNorm(RMSNorm):
    """An RMSNorm whose weight is kept in float32 and multiplies before the result is rounded (Gemma 4)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32), requires_grad=False)


class ZeroCentredRMSNorm(FullPrecisionRMSNorm):
    """An RMSNorm whose checkpoint has the weight less one (Gemma 2 and 3, Qwen3-Next, Qwen3.5). It is kept as the whole
    weight: 1 + w in bfloat16 would lose w."""

    def load(self, key: WeightKey, full: Tensor) -> None:
        super().load(key, full)
        self.weight.data.add_(1.0)


class UnweightedRMSNorm(FullPrecisionRMSNorm):
    """x / rms(x): the checkpoint has no weight."""

    def weight_keys(self) -> tuple[WeightKey, ...]:
        return ()

    def finish(self, options: GEMMOptions) -> None:
        self.weight.data.fill_(1.0)
