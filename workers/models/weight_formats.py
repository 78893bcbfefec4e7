"""Weight formats of a checkpoint's layers, for the log and `aerie plan`."""

from collections import Counter

from torch import nn

from workers.layers.experts import Experts
from workers.layers.latent_attention import LatentUpProjection
from workers.layers.linear import LinearBase
from workers.layers.linear_method import UnquantizedLinearMethod


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
