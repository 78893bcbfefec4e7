"""The matrices of a checkpoint that can be quantised: those of the model's linear layers and experts."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from aerie.cluster.config import ConfigError
from aerie.workers.config import ModelSource
from aerie.workers.distributed.tp_group import SOLO
from aerie.workers.layers.linear import LinearBase
from aerie.workers.layers.moe import Experts
from aerie.workers.models.config import ModelConfig
from aerie.workers.models.loading import allocate, read_target_config
from aerie.workers.models.name_map import NameMap
from aerie.workers.models.registry import family_of_config
from aerie.workers.models.weights import META, checkpoint_files, num_checkpoint_bytes, opened
from aerie.workers.quantization.quant_method import Unquantized, matches

HEAD = "lm_head"
_GATES = ("*.in_proj_a", "*.in_proj_b", "*.in_proj_ba")  # recurrent layers' gates: small, sensitive to rounding


@dataclass(frozen=True)
class Layer:
    """Matrices with the same inputs, by canonical module names.

    observed: the name under which calibration records the inputs.
    columns: number of inputs of each.
    """

    modules: tuple[str, ...]
    observed: str
    columns: int


class Entry(NamedTuple):
    """A tensor of the files. name: its name there. module: its canonical name without ".weight"."""

    name: str
    module: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class Source:
    """A 16- or 32-bit checkpoint. Raises ConfigError for other checkpoints and unreadable ones.

    entries: all tensors, by name.
    layers: layers that can be quantised.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, name = folder, f"model {folder}"
        try:
            self.config: ModelConfig = read_target_config(ModelSource(str(folder)), 1)
            if not isinstance(self.config.quant, Unquantized):
                raise ConfigError(f"{name}: is quantised already; give the checkpoint that it was made from")
            family = family_of_config(self.config, name)
            self.names: NameMap = family.weight_names(self.config)
            self.layers = list(_layers(family, self.config, self.names))
            self.entries = {entry.name: entry for entry in self._entries()}
        except ConfigError:
            raise
        except (ValueError, OSError) as error:
            raise ConfigError(str(error)) from None
        self.by_module = {entry.module: entry for entry in self.entries.values() if entry.name.endswith(".weight")}

    def _entries(self) -> Iterator[Entry]:
        """Yield an entry for each tensor of the checkpoint, from the headers of its files."""
        for path in checkpoint_files(self.folder):
            with opened(path, META) as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    header = file.get_slice(name)
                    shape, dtype = tuple(header.get_shape()), _DTYPES.get(header.get_dtype(), torch.uint8)
                    yield Entry(name, self.names.canonical_module(name.removesuffix(".weight")), path, shape, dtype)

    @property
    def num_bytes(self) -> int:
        return num_checkpoint_bytes(self.folder)

    @property
    def num_weights(self) -> int:
        return sum(torch.Size(entry.shape).numel() for entry in self.entries.values())

    def read(self, entry: Entry) -> Tensor:
        """Return a tensor; pages of its file are mapped, not copied. Raises ConfigError if it cannot be read."""
        try:
            with safe_open(str(entry.file), framework="pt") as file:
                tensor: Tensor = file.get_tensor(entry.name)
        except Exception as error:  # safetensors raises its own and Rust's exceptions
            raise ConfigError(f"{entry.file}: {entry.name} cannot be read ({error}); download it again") from None
        if tensor.is_floating_point() and tensor.numel() and not math.isfinite(largest(tensor)):
            raise ConfigError(f"{entry.file}: {entry.name} has numbers that are not finite; download it again")
        return tensor


def largest(tensor: Tensor) -> float:
    """Return the largest magnitude, or NaN if a value is NaN. Makes no copy."""
    low, high = tensor.aminmax()
    return float(torch.maximum(-low, high))


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _layers(family: object, config: ModelConfig, names: NameMap) -> Iterator[Layer]:
    """Return the model's linear layers and experts."""
    make = family.model  # type: ignore[attr-defined]
    model = allocate(lambda: make(config, SOLO, 1, META, ()), names, Unquantized(), torch.bfloat16, META)
    for path, layer in model.named_modules():
        if isinstance(layer, LinearBase) and layer.method.kinds:  # a tied head has none
            modules = tuple(dict.fromkeys(names.packed_name(path, part.name) for part in layer.shape.parts))
            yield Layer(modules, modules[0], layer.shape.in_features)
        elif isinstance(layer, Experts):
            shape = layer.shape
            first = names.packed_name(path, shape.gate_up.parts[0].name, 0)
            for expert in range(shape.held.total):
                gate_up = tuple(names.packed_name(path, part.name, expert) for part in shape.gate_up.parts)
                (down,) = (names.packed_name(path, part.name, expert) for part in shape.down.parts)
                yield Layer(gate_up, first, shape.size)
                yield Layer((down,), f"{first}#{expert}", shape.width)


def chosen_layers(source: Source, ignored: Sequence[str], head: bool, multiple: int) -> list[Layer]:
    """Return the layers to quantise.

    ignored: modules to leave, as names, names with `*`, or "re:" and a regular expression.
    head: whether to quantise the vocabulary head.
    multiple: the number of inputs must be a multiple of this.
    Raises ConfigError for an entry that matches nothing, a head tied to the embedding, and inputs that do not fit.
    """
    unused, chosen = set(ignored), []
    for layer in source.layers:
        unused -= {entry for entry in unused if any(_names_module(entry, module) for module in layer.modules)}
        if layer.modules == (HEAD,) and not head:
            continue
        modules = [
            module for module in layer.modules if not any(_names_module(entry, module) for entry in (*ignored, *_GATES))
        ]
        if modules:
            chosen.append(replace(layer, modules=tuple(modules)))
    if unused:
        raise ConfigError(f"--ignore {sorted(unused)[0]}: matches no module that would be quantised; leave it out")
    if head and not any(layer.modules == (HEAD,) for layer in source.layers):
        raise ConfigError("--head: this model's vocabulary head is its embedding, which stays in 16 bits; leave it out")
    if not chosen:
        raise ConfigError("--ignore: leaves nothing to quantise; ignore less")
    for layer in chosen:
        _check(source, layer, multiple)
    return chosen


def _names_module(entry: str, module: str) -> bool:
    """Return whether an entry of `--ignore` names the module."""
    return matches(entry, module) or fnmatchcase(module, entry)


def _check(source: Source, layer: Layer, multiple: int) -> None:
    """Raise ConfigError unless each module of a layer has a matrix, with a multiple of `multiple` inputs."""
    missing = [module for module in layer.modules if len(getattr(source.by_module.get(module), "shape", ())) != 2]
    if missing:
        raise ConfigError(
            f"model {source.folder}: has no matrix {missing[0]}.weight of its own (experts of a layer in one tensor, "
            "for example); convert the checkpoint to a tensor per matrix, or leave it out with --ignore"
        )
    if layer.columns % multiple:
        raise ConfigError(
            f"{layer.modules[0]}: its {layer.columns} inputs are no multiple of the group of {multiple}; set another "
            f"--group-size, or leave it out with --ignore {layer.modules[0]}"
        )


def unquantised_modules(source: Source, quantised: Collection[str]) -> list[str]:
    """Return the modules that are not quantised, by canonical names and names in the files."""
    left = [entry for entry in source.entries.values() if len(entry.shape) == 2 and entry.module not in quantised]
    names = {name for entry in left for name in (entry.module, entry.name.removesuffix(".weight"))}
    return sorted(names | ({HEAD} - set(quantised)))
