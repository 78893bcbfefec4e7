"""Checks once, after loading, that weights are finite. A damaged or badly trained checkpoint would answer with noise:
one NaN in a layer makes every token of every request NaN."""

from collections.abc import Callable, Iterable, Set

import torch
from torch import Tensor, nn

from aerie.kernels.kv.fp8 import FP8
from aerie.workers.layers.weighted import WeightedModule
from aerie.workers.models.name_map import NameMap
from aerie.workers.models.weights import CheckpointTensor, first_names, wanted_tensors, weighted_modules

_FP8_NAN = 0x7F  # NaN of float8_e4m3fn, which has no infinity; with the sign bit 0xFF


def check_finite(
    model: nn.Module,
    read: Callable[[], Iterable[CheckpointTensor]],
    names: NameMap,
    source: str,
    elsewhere: Set[str] = frozenset(),
) -> None:
    """Raise ValueError, naming file and tensor, if weights of `model` are NaN or infinite. Reads every weight once on
    its device, without a copy, with one device sync. Skips modules that load no tensor, which `finish` fills later.

    read: returns the checkpoint's tensors again; called only to name the wrong ones.
    elsewhere, source: see `load_weights`.
    """
    modules = [
        (path, module) for path, module in weighted_modules(model) if path not in elsewhere and module.weight_keys()
    ]
    bad = _not_finite(modules)
    if not bad:
        return
    wanted = wanted_tensors(model, names, elsewhere)
    found = []
    for name, tensor, file in read():
        modules_of = {wanted.get(piece, (None, None))[0] for piece, _ in names.pieces(name, tensor)}
        if modules_of & bad.keys() and not bool(torch.isfinite(tensor.float()).all()):
            found.append(f"{name} ({file})")
    if not found:
        dtype = next(model.parameters()).dtype
        named = first_names(list(bad.values()))
        raise ValueError(f"{source}: weights of {named} overflow {dtype}; set dtype: bfloat16")
    raise ValueError(f"{source}: weights are NaN or infinite: {first_names(found)}; download the checkpoint again")


def _not_finite(modules: list[tuple[str, WeightedModule]]) -> dict[WeightedModule, str]:
    """Return the modules with a weight that is not finite, and their paths."""
    owners, flags = [], []
    for path, module in modules:
        for parameter in module.parameters():
            if parameter.numel() and parameter.is_floating_point():
                owners.append((module, path))
                flags.append(_is_finite(parameter.data))
    finite = torch.stack(flags).tolist() if flags else []
    return dict(owner for owner, is_finite in zip(owners, finite, strict=True) if not is_finite)


def _is_finite(weight: Tensor) -> Tensor:
    """Return one bool on the weight's device. Extrema need no memory; `torch.isfinite` allocates a mask."""
    if weight.dtype == FP8:
        as_signed, as_unsigned = weight.view(torch.int8).amax(), weight.view(torch.uint8).amax()
        return (as_signed < _FP8_NAN) & (as_unsigned < _FP8_NAN + 0x80)
    low, high = torch.aminmax(weight)  # both are NaN if any weight is
    return torch.isfinite(low) & torch.isfinite(high)
