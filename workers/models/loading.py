"""Loads a checkpoint folder as this rank's target: configuration, checks and weights. Checks once, after loading, that
weights are finite: one NaN in a layer would make every token of every request NaN."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from aerie.kernels.capability import Capability
from aerie.kernels.kv.stored_values import FP8
from aerie.workers.config import ModelSource
from aerie.workers.device import resolve_dtype
from aerie.workers.distributed.tp_group import TPGroup
from aerie.workers.layers.linear import LinearBase, finish_weights
from aerie.workers.layers.moe import Experts
from aerie.workers.layers.rotary import with_rope_scaling
from aerie.workers.layers.weighted import WeightedModule
from aerie.workers.models.config import ModelConfig, read_config_json
from aerie.workers.models.decoder import TargetModel
from aerie.workers.models.name_map import NameMap
from aerie.workers.models.registry import family_for, family_of_config
from aerie.workers.models.weights import (
    Advance,
    CheckpointTensor,
    checkpoint_tensors,
    counted,
    fill_dummy,
    first_names,
    load_weights,
    modules_with_weight,
    num_checkpoint_bytes,
    wanted_tensors,
    weight_formats,
    weighted_modules,
)
from aerie.workers.quantization.kv_scheme import read_kv_scheme
from aerie.workers.quantization.quant_method import QuantMethod

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
    faults = []
    for name, tensor, file in read():
        modules_of = {wanted.get(piece, (None, None))[0] for piece, _ in names.pieces(name, tensor)}
        if modules_of & bad.keys() and not bool(torch.isfinite(tensor.float()).all()):
            faults.append(f"{name} ({file})")
    if not faults:
        dtype = next(model.parameters()).dtype
        named = first_names(list(bad.values()))
        raise ValueError(f"{source}: weights of {named} overflow {dtype}; set dtype: bfloat16")
    raise ValueError(f"{source}: weights are NaN or infinite: {first_names(faults)}; download the checkpoint again")


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


logger = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def read_target_config(source: ModelSource, tensor_parallel: int, expert_parallel: bool = False) -> ModelConfig:
    """Read and check the target's configuration. Raises ValueError that names fault and remedy."""
    name = f"model {source.path}"
    raw = with_rope_scaling(read_config_json(source.path), source.rope_scaling or {}, name)
    family = family_for(raw, name, source.implementation)
    config: ModelConfig = family.read_config(raw, name)
    quant = fitted_quant(config.quant, source.path, family.weight_names(config))
    config = replace(config, quant=quant, kv_scheme=read_kv_scheme(source.path, raw))
    if expert_parallel:
        config = config.with_whole_experts(name)
    config.check_shards(tensor_parallel, name)
    limit = source.max_model_len
    if limit is not None and not 2 <= limit <= config.max_position:
        raise ValueError(
            f"model.max_model_len={limit}: must be 2 to the model's max_position_embeddings="
            f"{config.max_position}; leave it out to take that"
        )
    return config


def fitted_quant(quant: QuantMethod, folder: str | Path, names: NameMap) -> QuantMethod:
    """Return the quantisation of the checkpoint's files, which may have more unquantised modules than config.json
    lists."""
    return quant.fitted(lambda: frozenset(map(names.canonical_module, modules_with_weight(folder))))


def load_target(
    source: ModelSource,
    config: ModelConfig,
    group: TPGroup,
    device: torch.device,
    max_position: int,
    capture: tuple[int, ...] = (),
    deterministic: bool = False,
    advance: Advance = lambda done, total: None,
    adapted: bool = False,
) -> TargetModel:
    """Load this rank's shard of the target. Raises ValueError as `fill_target` does.

    max_position: rows of the rotary table, an exclusive bound on positions.
    capture: layers whose outputs a draft reads.
    deterministic, adapted: see `finish_weights`.
    advance: called with the number of loaded bytes and of all bytes.
    """
    name = f"model {source.path}"
    capability = Capability.of(device)
    config.check_device(capability, resolve_dtype(source.dtype, config.dtype, capability), name)
    if config.served_by is not None and group.rank == 0:
        logger.info("%s: served by %s", name, config.served_by)
    fallback = config.quant.fallback(device)
    if fallback is not None and group.rank == 0:
        logger.warning("%s: %s", name, fallback)
    began_s = time.monotonic()
    with _one_thread(capability):
        model = fill_target(source, config, group, device, max_position, capture, advance)
    if source.load_format != "dummy" and group.rank == 0:
        seconds, size = time.monotonic() - began_s, num_checkpoint_bytes(source.path) / 1e9
        logger.info("%s: %.2f GB read in %.1f s (%.2f GB/s)", name, size, seconds, size / max(seconds, 1e-6))
    formats = weight_formats(model)
    if formats and group.rank == 0:
        logger.info("%s: layers by format: %s", name, formats)
    with _one_thread(capability):
        finish_weights(model, deterministic, adapted)
    return model.eval()


@contextmanager
def _one_thread(capability: Capability) -> Iterator[None]:
    """Convert weights by one thread on a CPU: the many short operations are limited by memory, and each would wait for
    its slowest thread while Ray and Serve start on the same cores."""
    before = torch.get_num_threads()
    if capability.shares_host_memory:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fill_target(
    source: ModelSource,
    config: ModelConfig,
    group: TPGroup,
    device: torch.device,
    max_position: int,
    capture: tuple[int, ...] = (),
    advance: Advance = lambda done, total: None,
) -> TargetModel:
    """Do `load_target` without packing the weights. device: "meta" only reads and checks the headers of the files.

    Raises ValueError naming file and tensor if the checkpoint is damaged, does not fit, or is not finite.
    """
    name = f"model {source.path}"
    names = weight_names(config, name)
    dtype = resolve_dtype(source.dtype, config.dtype, Capability.of(device))
    model = allocate_target(config, group, device, max_position, capture, dtype, name)
    if source.load_format == "dummy":
        fill_dummy(model, source.seed, group.rank)
    else:
        read = partial(checkpoint_tensors, source.path, device)
        load_weights(model, counted(read(), source.path, advance), names, name)
        if Capability.of(device).has_memory:
            check_finite(model, read, names, name)
    return model


def weight_names(config: ModelConfig, name: str) -> NameMap:
    """Return the checkpoint's names of the target's tensors. name: of the model, for errors."""
    names: NameMap = family_of_config(config, name).weight_names(config)
    return names


def allocate_target(
    config: ModelConfig,
    group: TPGroup,
    device: torch.device,
    max_position: int,
    capture: tuple[int, ...],
    dtype: torch.dtype,
    name: str,
) -> TargetModel:
    """Build this rank's part of the target with uninitialised parameters.

    max_position: rows of the rotary table, an exclusive bound on positions.
    capture: layers whose outputs a draft reads.
    dtype: of parameters that are not quantised.
    name: of the model, for errors.
    """
    family = family_of_config(config, name)
    return allocate(
        lambda: family.model(config, group, max_position, device, capture),
        weight_names(config, name),
        config.quant,
        dtype,
        device,
    )


def allocate(
    make: Callable[[], ModuleT], names: NameMap, quant: QuantMethod, dtype: torch.dtype, device: torch.device
) -> ModuleT:
    """Build a module with `make`, give its layers the methods of the checkpoint's quantisation, and allocate
    uninitialised parameters on `device`.

    names: names of the checkpoint's tensors.
    dtype: dtype of parameters whose layer does not choose one.
    """
    with torch.device("meta"), _default_dtype(dtype):
        model = make()
        for path, layer in model.named_modules():
            if isinstance(layer, LinearBase) and layer.method.kinds:  # a tied head has none
                modules = [names.packed_name(path, part.name) for part in layer.shape.parts]
                layer.method = quant.linear_method(modules, layer.shape)
            elif isinstance(layer, Experts):
                modules = [names.packed_name(path, part.name, 0) for part in layer.shape.parts]
                layer.method = quant.experts_method(modules, layer.shape)
    # not `to_empty`, because a storage may be larger than its parameter
    model._apply(lambda planned: _memory_for(planned, device))  # type: ignore[no-untyped-call]
    return model


def _memory_for(planned: Tensor, device: torch.device) -> Tensor:
    """Allocate a meta tensor's whole storage on `device`, which may be larger than the tensor
    (`aerie.workers.layers.experts_method.ExpertsShape.stacked`)."""
    storage = torch.empty(planned.untyped_storage().nbytes() // planned.itemsize, dtype=planned.dtype, device=device)
    return storage.as_strided(planned.shape, planned.stride(), planned.storage_offset())


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
