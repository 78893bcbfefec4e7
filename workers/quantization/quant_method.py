"""`QuantMethod`: a checkpoint's quantization_config, for its linear layers and experts; reads and checks its fields,
and matches modules with its entries. `aerie.workers.quantization.table` lists all; adding one:
docs/add-a-quantisation.md."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch

from aerie.workers.layers.experts_method import ExpertsMethod, ExpertsShape, UnquantizedExperts
from aerie.workers.layers.linear_method import LinearMethod, LinearShape, UnquantizedLinearMethod


class QuantMethod(ABC):
    """A plain value, equal on every rank; part of a model's configuration."""

    def fallback(self, device: torch.device) -> str | None:
        """Return a log message if weights are not multiplied as the checkpoint intends, else None."""
        return None

    def fitted(self, with_weight: Callable[[], frozenset[str]]) -> "QuantMethod":
        """Return the method of a checkpoint in which the modules `with_weight()` have a tensor `weight`, although
        quantization_config may not say so."""
        return self

    @abstractmethod
    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        """Return the method of the layer with the checkpoint's modules `names` ("model.layers.0.self_attn.q_proj",
        ...), one per part of `shape`. Some modules may be unquantised, for example the vocabulary head.

        Raises ValueError if they disagree, or if the shape cannot be stored.
        """

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        """Return the method of a layer's routed experts. names: names of the first expert's matrices
        ("model.layers.3.mlp.experts.0.gate_proj", ...).

        Raises ValueError if they are not supported.
        """
        raise ValueError(f"{names[0]}: experts quantised like this are not supported; use the checkpoint in bf16")


@dataclass(frozen=True)
class Unquantized(QuantMethod):
    """Every weight in bfloat16, float16 or float32."""

    def linear_method(self, names: Sequence[str], shape: LinearShape) -> LinearMethod:
        return UnquantizedLinearMethod(shape)

    def experts_method(self, names: Sequence[str], shape: ExpertsShape) -> ExpertsMethod:
        return UnquantizedExperts(shape)


def all_or_none(names: Sequence[str], ignores: Callable[[str], bool]) -> bool:
    """Return whether all modules of a layer are unquantised. Raises ValueError if only some are."""
    left = [name for name in names if ignores(name)]
    if left and len(left) < len(names):
        raise ValueError(
            f"quantization_config: of {', '.join(names)}, which are multiplied together, only {', '.join(left)} "
            "are left unquantised; use the checkpoint in bf16"
        )
    return bool(left)


def list_of_names(quantization: Mapping[str, Any], key: str, source: str) -> tuple[str, ...]:
    """Return the modules that quantization_config lists under `key`; () without the key. Raises ValueError naming
    `source`."""
    names = quantization.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{source}: quantization_config.{key}={names!r}: must be a list of modules' names")
    return tuple(names)


def contains(entry: str, name: str) -> bool:
    """Return whether an entry is the module, a module that contains it, or some consecutive components of its name.
    Dots at the entry's ends are ignored, as in "layers.0."."""
    return f".{entry.strip('.')}." in f".{name}."


def matches(target: str, name: str) -> bool:
    """Return whether an entry of compressed-tensors matches the module: by name, or with "re:" by a pattern for its
    beginning."""
    return re.match(target[3:], name) is not None if target.startswith("re:") else target == name


def is_listed(entry: str, name: str) -> bool:
    """Return whether an entry of modelopt (a name, or a pattern with `*`) matches the module or one that contains
    it."""
    return matches(entry, name) or fnmatchcase(name, entry) or fnmatchcase(name, f"{entry}.*")


def check_pattern(pattern: str, key: str, source: str) -> None:
    """Raise ValueError unless `pattern` is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        refuse(source, key, pattern, f"is no regular expression ({error})")


def setting(quantization: Mapping[str, Any], *keys: str) -> Any:
    """Return the value of the first of the keys that is set; None if none is."""
    return next((quantization[key] for key in keys if quantization.get(key) is not None), None)


def refuse(source: str, key: str, value: object, rule: str, remedy: str = "use the checkpoint in bf16") -> NoReturn:
    raise ValueError(f"{source}: quantization_config.{key}={value!r} {rule}; {remedy}")


def bits_of(
    quantization: Mapping[str, Any], source: str, *keys: str, supported: tuple[int, ...] = (4, 8), within: str = ""
) -> int:
    """Return the number of bits. within: name of the section `quantization`, for errors."""
    bits = setting(quantization, *keys)
    if type(bits) is not int or bits not in supported:
        known = " and ".join(map(str, supported))
        refuse(source, within + keys[0], bits, f"is not supported; {known} bits are")
    return bits


def group_of(quantization: Mapping[str, Any], source: str, *keys: str) -> int | None:
    """Return the number of inputs per group; None for -1, a scale per output."""
    size = setting(quantization, *keys)
    if type(size) is not int or (size != -1 and size < 1):
        refuse(source, keys[0], size, "must be a number of inputs, or -1 for a scale per output", "download it again")
    return None if size == -1 else size


def flag_in(quantization: Mapping[str, Any], source: str, key: str, default: bool | None = None) -> bool:
    """Return true or false. default: for a missing or null key; None: the key is required."""
    value = quantization.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        refuse(source, key, value, "must be true or false", "download the checkpoint again")
    return value


def only(quantization: Mapping[str, Any], source: str, key: str, *supported: object) -> None:
    """Raise ValueError unless a key has one of these values, or is null or missing."""
    value = quantization.get(key)
    declared = value.lower() if isinstance(value, str) else value
    if value is not None and declared not in supported:
        refuse(source, key, value, f"is not supported; only {', '.join(map(repr, supported))} is")
