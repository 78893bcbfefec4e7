"""Parses JSON in strings: arguments of tool calls, some of which models wrote, and schemas.

Python's parser accepts half of a surrogate pair, which UTF-8 cannot express, and nesting so deep that later recursion
fails.
"""

import ast
import json
import math
import re
import warnings
from typing import Any

import numpy as np
import pydantic_core

# Maximum depth of objects and lists. Rendering a chat takes a few of Python's 1,000 frames per level; pydantic's
# serializer is limited to 255.
MAX_NESTING = 200
# An escaped backslash, a whole surrogate pair, or half of one.
_ESCAPES = re.compile(
    r"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*', re.DOTALL)  # a JSON string without its closing quotation mark
_CONTROL = re.compile(r"[\x00-\x1f]")
_MAX_LITERAL_CHARS = 2**16  # Python's parser takes 100 bytes of memory per character
_SURROGATES = re.compile("[\ud800-\udfff]")


class Repaired(dict[str, Any]):
    """Arguments of a call that are not those of its text as it stands."""


def parsed(text: str) -> Any:
    """Return the value of a client's JSON text. Raises ValueError: it is not JSON, nested too deeply, or has NaN, a
    number beyond a float's or half of a surrogate pair."""
    value = _loaded(text, parse_constant=_finite, parse_float=_finite)
    if repaired(text) != text:
        raise ValueError(r"it has half of a surrogate pair, such as \ud83d alone")
    return value


def parsed_repaired(text: str) -> Any:
    """Return the value of a JSON text that a model wrote, `repaired`; it may have line ends in its strings. Raises
    ValueError: it is not JSON, or nested too deeply."""
    return _loaded(repaired(text), strict=False)


def call_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of an earlier call from their text. Without an object in it, `Repaired`: its first object,
    up to where it was cut, written in JSON or in Python's literals; {} if there is none."""
    try:
        value = parsed_repaired(text.strip() or "null")
    except ValueError:
        return Repaired(_partial_object(without_surrogates(repaired(text))) or _literal_object(text))
    if isinstance(value, str):
        return Repaired(call_arguments(value))
    return value if isinstance(value, dict) else {} if value is None else Repaired()


def _partial_object(text: str) -> dict[str, Any]:
    """Return the object at the start of JSON text that may be cut off; {} if there is none."""
    escaped = _STRING.sub(lambda match: _CONTROL.sub(lambda it: f"\\u{ord(it[0]):04x}", match[0]), text)
    try:
        value = pydantic_core.from_json(escaped, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _literal_object(text: str) -> dict[str, Any]:
    """Return the object that a Python literal describes; {} for other text."""
    if len(text) > _MAX_LITERAL_CHARS:
        return {}
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            value = parsed_repaired(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def repaired(text: str) -> str:
    """Return a JSON text with U+FFFD in place of escaped halves of surrogate pairs: a model that writes an emoji as
    escapes may stop in the middle."""
    if "\\u" not in text:
        return text
    return _ESCAPES.sub(lambda match: "\\ufffd" if match[1] else match[0], text)


def without_surrogates(text: str) -> str:
    """Return a text with U+FFFD in place of halves of surrogate pairs."""
    return _SURROGATES.sub("\ufffd", text)


def nesting(raw: bytes) -> tuple[int, int]:
    """Return how many lists and objects a JSON document has, and how deep they are nested. Takes 0.1 s for 8 MB.

    Values that a later duplicate of their key replaces count, because parsers build them too. If `raw` is not valid
    JSON, both numbers are meaningless."""
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")  # within strings alone
    characters = np.frombuffer(plain, np.uint8)
    is_inside = np.bitwise_xor.accumulate(characters == ord('"'))  # a string
    folded = np.where(is_inside, 0, characters | 0x20)  # [ and ] become { and }
    steps = (folded == ord("{")).astype(np.int8) - (folded == ord("}"))
    return int(np.count_nonzero(steps == 1)), int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def _loaded(text: str, **options: Any) -> Any:
    """Parse a JSON text. options: options of `json.loads`."""
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise _too_deep() from None
    if nesting(text.encode("utf-8", "surrogatepass"))[1] > MAX_NESTING:
        raise _too_deep()
    return value


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:40]} is no number of JSON")
    return float(text)


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_NESTING} deep")
