"""Memory and formats of a model's weights, for the log and `aerie plan`. Allocates nothing."""

from collections import Counter
from dataclasses import replace

import torch
from torch import nn

from aerie.kernels.gemm.workspace import GEMMOptions
from aerie.workers.layers.experts import Experts
from aerie.workers.layers.latent_attention import LatentUpProjection
from aerie.workers.layers.linear import LinearBase
from aerie.workers.layers.linear_method import UnquantizedLinearMethod
from aerie.workers.layers.weighted import WeightMethod

META = torch.device("meta")


def weight_bytes(model: nn.Module, multiplies_fp8: bool, without: tuple[str, ...] = ()) -> int:
    """Return the bytes of a model's weights on a GPU.

    model: a model on the meta device, see `aerie.workers.models.loading.allocate`.
    multiplies_fp8: whether the device multiplies FP8, so that FP8 weights stay FP8 if possible.
    without: modules shared with another model.
    """
    options = GEMMOptions(fp8=multiplies_fp8, packed=True)
    absorbed = replace(options, fp8=False, packed=False)  # MLA multiplies these per head, in the model's dtype
    total = 0
    for path, module in model.named_modules():
        if f"{path}.".startswith(tuple(f"{other}." for other in without)):
            continue
        if isinstance(module, LinearBase | Experts):
            total += module.method.num_bytes(absorbed if isinstance(module, LatentUpProjection) else options)
    methods = {
        id(tensor) for module in model.modules() if isinstance(module, WeightMethod) for tensor in module.parameters()
    }
    named = (*model.named_parameters(), *model.named_buffers())
    others = [tensor for name, tensor in named if not name.startswith(tuple(f"{each}." for each in without))]
    return total + sum(tensor.nbytes for tensor in others if id(tensor) not in methods)


def weight_formats(model: nn.Module) -> str:
    """Return formats and numbers of layers, such as "int4 in groups of 128 (144), unquantised (1)"; "" if all layers
    are unquantised. The experts of a layer count as one."""
    counts: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, LatentUpProjection) and not isinstance(module.method, UnquantizedLinearMethod):
            counts[f"{module.method.format}, dequantised"] += 1  # multiplied head by head
        elif isinstance(module, LinearBase | Experts) and module.method.kinds:  # a tied head has none
            counts[module.method.format] += 1
    if set(counts) <= {"unquantised"}:
        return ""
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common())
