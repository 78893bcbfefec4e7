"""Shared experts with adapters on a GPU. A pass without adapters multiplies them with the routed experts, in the same
kernels. A pass with adapters multiplies them alone, with their adapters, beside the routed ones."""

import torch
from torch import nn

from aerie.kernels.experts.route import TokenSlots
from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.workers.layers.experts_method import DenseExperts, UnquantizedExperts
from aerie.workers.layers.moe import MixtureOfExperts


def kept_bytes(model: nn.Module, options: GEMMOptions) -> int:
    """Return the bytes of shared experts that a rank with adapters has twice.

    model: on the meta device.
    options: of the device. Only with `fp8` are shared experts joined to the routed ones.
    """
    if not options.fp8:
        return 0
    total = 0
    for layer in model.modules():
        if not isinstance(layer, MixtureOfExperts) or not isinstance(layer.experts.method, DenseExperts):
            continue
        num_shared, shared = layer.experts.shape.num_shared, layer.shared_experts
        methods = [] if not num_shared or shared is None else [shared.gate_up.method, shared.down_proj.method]
        is_view = num_shared == 1 and isinstance(layer.experts.method, UnquantizedExperts)
        total += 0 if is_view else sum(method.num_bytes(options) for method in methods)
    return total


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
