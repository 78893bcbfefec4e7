"""How much memory a model's weights take on one rank once they are loaded, from its configuration alone: for `aerie
plan`. Nothing is allocated."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import nn

from workers.layers.latent_attention import LatentUpProjection
from workers.models.loading import allocate
from workers.models.name_map import NameMap
from workers.quantization.fp8_experts import Fp8Experts
from workers.quantization.fp8_linear import Fp8Linear
from workers.quantization.fp8_weight import FP8, unreadable
from workers.quantization.quant_method import QuantMethod

META = torch.device("meta")


def weight_bytes(
    make: Callable[[], nn.Module],
    names: NameMap,
    quant: QuantMethod,
    dtype: torch.dtype,
    multiplies_fp8: bool,
    without: tuple[str, ...] = (),
) -> int:
    """Of what `make` makes, see `workers.models.loading.allocate`. multiplies_fp8: whether the device does, so that
    weights of FP8 stay so where they can. without: modules that another model holds."""
    model = allocate(make, names, quant, dtype, META)
    dequantised = {
        id(weight)
        for module in model.modules()
        for weight in _fp8_weights(module)
        if not multiplies_fp8 or not _is_kept(module)
    }
    for module in model.modules():
        if isinstance(module, LatentUpProjection):  # is multiplied by head after head, in the model's type
            dequantised |= {id(weight) for weight in _fp8_weights(module.method)}
    total = 0
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not name.startswith(tuple(f"{module}." for module in without)):
            total += tensor.numel() * (dtype.itemsize if id(tensor) in dequantised else tensor.element_size())
    return total


def _fp8_weights(module: nn.Module) -> list[nn.Parameter]:
    if not isinstance(module, Fp8Linear | Fp8Experts):
        return []
    return [parameter for parameter in module.parameters() if parameter.dtype == FP8]


def _is_kept(module: nn.Module) -> bool:
    """Whether kernels can read how scales lie."""
    if isinstance(module, Fp8Linear):
        return unreadable(module.shape.parts, module.scheme) is None
    assert isinstance(module, Fp8Experts)
    shapes = module.shape.gate_up, module.shape.down
    return all(unreadable(shape.parts, module.scheme) is None for shape in shapes)
