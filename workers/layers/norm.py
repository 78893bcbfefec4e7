"""RMSNorm (arXiv 1910.07467)."""

import torch
from torch import Tensor, nn

from workers.distributed.tp_group import SOLO, TPGroup
from workers.layers.weighted import WeightedModule, WeightKey, check_shape


class RMSNorm(WeightedModule):
    """x / rms(x) * weight over the last dimension, computed in float32 for half types."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            from workers.layers.kernels.norm_activation import rms_norm

            return rms_norm(x.contiguous(), self.weight, self.eps)
        full = x.float()
        normed = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight

    def add(self, x: Tensor, residual: Tensor, group: TPGroup = SOLO) -> tuple[Tensor, Tensor]:
        """The norm of residual + x, and that sum; on a GPU the sum is written into `residual`. group: ranks each of
        which has a part of x, which are summed first."""
        normed = group.all_reduce_add_norm(x, residual, self.weight, self.eps)
        if normed is not None:
            return normed, residual
        x = group.all_reduce(x)
        if x.is_cuda:
            from workers.layers.kernels.norm_activation import add_rms_norm

            return add_rms_norm(x, residual, self.weight, self.eps), residual
        residual = residual + x
        return self(residual), residual

    def weight_keys(self) -> tuple[WeightKey, ...]:
        return (WeightKey("weight"),)

    def load(self, key: WeightKey, full: Tensor) -> None:
        check_shape(full, self.weight.shape)
        self.weight.data.copy_(full)

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.weight.data.fill_(1.0)
