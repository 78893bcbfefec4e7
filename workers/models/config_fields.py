"""Readers of fields of config.json, for targets and drafts. They raise ValueError, with checkpoint, field, value and
rule, for a value of the wrong kind or out of range."""

import math
from collections.abc import Mapping
from typing import Any

MAX_SIZE = 2**31 - 1  # limit of one dimension: kernels index with int32
MAX_LAYERS = 1000  # about eight times the deepest published model
MAX_EXPERTS = 4096  # limit per layer; published models have up to 512
MAX_POSITIONS = 10**8  # ten times the longest published context

_REMEDY = "correct it, or download the checkpoint again"


def architecture_of(config: Mapping[str, Any], default: str = "") -> str:
    """Return the first of "architectures", or `default`."""
    declared = config.get("architectures") or [default]
    return str(declared[0]) if isinstance(declared, list) else str(declared)


def size_of(
    config: Mapping[str, Any],
    key: str,
    source: str,
    default: int | None = None,
    min_value: int = 1,
    max_value: int = MAX_SIZE,
) -> int:
    """Return a whole number from `min_value` to `max_value`. default: for a missing or null field; None: the field must
    be there."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise ValueError(
                f"{source}: config.json lacks {key!r}, which a {architecture_of(config, 'model')} needs; {_REMEDY}"
            )
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not min_value <= value <= max_value:
        raise _refused(source, key, value, f"must be a whole number from {min_value} to {max_value}")
    return value


def number_of(config: Mapping[str, Any], key: str, source: str, default: float) -> float:
    """Return a finite number above 0. default: for a missing or null field."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_positive(value):
        raise _refused(source, key, value, "must be a number above 0")
    return float(value)


def flag_of(config: Mapping[str, Any], key: str, source: str, default: bool = False) -> bool:
    """Return true or false. default: for a missing or null field."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _refused(source, key, value, "must be true or false")
    return value


def section_of(config: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    """Return an object; {} for a missing or null field."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _refused(source, key, value, "must be an object")
    return value


def ids_of(config: Mapping[str, Any], key: str, source: str) -> tuple[int, ...]:
    """Return one token id or a list of them as a tuple; () for a missing or null field. Includes -1, which is not a
    token id."""
    value = config.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or not -1 <= token <= MAX_SIZE for token in ids):
        raise _refused(source, key, value, "must be a token id, or a list of token ids")
    return tuple(ids)


def _is_positive(value: float) -> bool:
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:  # a whole number beyond float's range
        return False


def _refused(source: str, key: str, value: object, rule: str) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return ValueError(f"{source}: config.json: {key}={shown}: {rule}; {_REMEDY}")
