"""Shared experts with adapters on a GPU. A pass without adapters multiplies them with the routed experts, in the same
kernels. A pass with adapters multiplies them alone, with their adapters, beside the routed ones."""

import torch
from torch import nn

from aerie.kernels.experts.route import TokenSlots
from aerie.workers.layers.moe import MixtureOfExperts


def launch_routed_experts(model: nn.Module) -> None:
    """Launch the kernels of routed experts without shared ones, which passes with adapters launch, so that no step
    compiles one. Layers of equal sizes share them. All rows are padding."""
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts) and module.joined]
    for layer in {(layer.experts.shape, layer.experts.method.format): layer for layer in layers}.values():
        router, method = layer.router, layer.experts.method
        for rows in method.routed_rows():
            x = torch.zeros(rows, layer.experts.shape.size, dtype=method.dtype, device=router.weight.device)
            slots = torch.zeros(rows, dtype=torch.int64, device=x.device)
            method.multiply_routed(x, router.scored(x, TokenSlots(slots, 1)))
