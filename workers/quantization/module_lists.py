"""Matches modules with entries of a quantization_config, and reads and checks its fields."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NoReturn


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
    given = value.lower() if isinstance(value, str) else value
    if value is not None and given not in supported:
        refuse(source, key, value, f"is not supported; only {', '.join(map(repr, supported))} is")
