"""Patterns of schemas that the compiler needs in another form: those that libraries write and it cannot read, and those
with characters that JSON writes as escapes, which no answer contains. xgrammar (0.2.8) excludes such characters only
from patterns that become one automaton. Read by `aerie.workers.structured_output.json_schema`; plain values, no torch.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from aerie.workers.structured_output.schema_keywords import Schema

_NOT = r'\u0000-\u001f"\\'  # for negated classes
_NEVER = r"[^\u0000-\u{10ffff}]"
_SPACE = r" \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"  # ECMA-262, 12.2 and 12.3
# The escapes of several characters, without those that JSON escapes.
_SETS = {
    r"\s": _SPACE,
    r"\S": r"!#-\[\]-\u009f\u00a1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e\u2060-\u2fff\u3001-\ufefe"
    r"\uff00-\u{10ffff}",
    r"\D": r" !#-/:-\[\]-\u{10ffff}",
    r"\W": r" !#-/:-@\[\]\^`{-\u{10ffff}",
}
_CHARACTER = r"\\u\{[0-9A-Fa-f]+\}|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\.|[^\\]"
_PART = re.compile(rf"\[\^?(?:\\.|[^\]\\])*\]|{_CHARACTER}", re.DOTALL)
_ITEM = re.compile(rf"(?P<low>{_CHARACTER})(?:-(?P<high>{_CHARACTER}))?", re.DOTALL)
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_ALLOWED = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF))


def without_escaped(pattern: str) -> str:
    """Return a pattern that matches the texts of `pattern` without the characters that JSON escapes."""
    return "".join(_without_escaped(match[0]) for match in _PART.finditer(pattern))


def _without_escaped(part: str) -> str:
    """Return a part of a pattern without the characters that JSON escapes. part: a character, an escape or a character
    class."""
    if part == ".":
        return f"[^{_NOT}]"
    if part in _SETS:
        return f"[{_SETS[part]}]"
    if part.startswith("[^") and len(part) > 3:
        inner = part[2:-1]
        return f"[^{_NOT}{chr(92) if inner[0] == '-' else ''}{inner}]"
    if part.startswith("[") and len(part) > 2:
        inner = "".join(_item(match["low"], match["high"]) for match in _ITEM.finditer(part[1:-1]))
        return f"[{inner}]" if inner else _NEVER
    code = _code(part)
    return part if code is None or any(low <= code <= high for low, high in _ALLOWED) else _NEVER


def _item(low: str, high: str | None) -> str:
    """Return a character, set or range of a character class without the characters that JSON escapes."""
    first, last = _code(low), _code(high or low)
    if first is None or last is None:
        return _SETS.get(low, low) + ("" if high is None else "-" + high)
    ranges = [(max(first, begin), min(last, end)) for begin, end in _ALLOWED]
    return "".join(
        _written(begin) + (f"-{_written(end)}" if end > begin else "") for begin, end in ranges if begin <= end
    )


def _written(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\u{{{code:x}}}"


def _code(character: str) -> int | None:
    """Return the code of a character as a pattern writes it; None for an escape of another meaning."""
    if len(character) == 1:
        return ord(character)
    kind = character[1]
    if kind in "ux" and len(character) > 2:
        return int(character[2:].strip("{}"), 16)
    if kind in _CONTROLS:
        return _CONTROLS[kind]
    return None if kind.isalnum() else ord(kind)


_TIME = r"(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,28}[a-zA-Z0-9])?"  # 8 with their dots have at most 248 characters
_EMAIL = r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
# By the pattern of zod 4.0 to 4.5 for a format, and of pydantic 2.12 and 2.13 for a decimal: one without look-around
# that matches the same texts, or fewer. zod 4.6 writes `_EMAIL` itself.
_STAND_INS = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": _EMAIL,
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:T{_TIME})?|T{_TIME})$"
    ),
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$": rf"^{_LABEL}(?:\.{_LABEL}){{0,7}}\.?$",
}

_LARGE_BOUND = re.compile(r"\{(?:\d*,)?0*(?:12[89]|1[3-9]\d|[2-9]\d\d|[1-9]\d{3,})[,}]")

# Minimum and maximum length of a format's texts, and a pattern of some of them within these lengths; None: of all.
_LENGTHS: dict[str, tuple[int, int, str | None]] = {
    "date": (10, 10, None),
    "uuid": (36, 36, None),
    "ipv4": (7, 15, None),
    "email": (6, 218, rf"^[a-zA-Z0-9_+-]{{1,64}}@(?:{_LABEL}\.){{1,4}}[a-zA-Z]{{2,29}}$"),
    "uri": (
        8,
        297,
        rf"^https?://{_LABEL}(?:\.{_LABEL}){{0,3}}(?::[1-9][0-9]{{0,3}})?(?:/[a-zA-Z0-9._~/?=&-]{{0,160}})?$",
    ),
}


def without_lengths(schema: Schema) -> Schema:
    """Return a string's schema without lengths that all texts of its format have, if need be of fewer texts."""
    kind = "email" if schema.get("pattern") == _EMAIL else None if "pattern" in schema else schema.get("format")
    low, high = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    if kind not in _LENGTHS or not {"minLength", "maxLength"} & schema.keys() or type(low) is not int:
        return schema
    shortest, longest, pattern = _LENGTHS[kind]
    if low > shortest or (type(high) is not int and high != math.inf):
        return schema
    fields = {key: value for key, value in schema.items() if key not in ("minLength", "maxLength")}
    if high == math.inf or (pattern is None and high >= longest):
        return fields
    if pattern is None or high < longest:
        return schema
    fields.pop("format", None)
    return fields | {"pattern": pattern}


def compiled_form(pattern: Any) -> Any:
    """Return a pattern as the compiler reads it: it matches the same texts, or fewer."""
    return _with_outer_anchors(_STAND_INS.get(pattern, pattern)) if isinstance(pattern, str) else pattern


def _with_outer_anchors(pattern: str) -> str:
    """Return a pattern of several anchored cases, such as ^a$|^b$, with the anchors around all of them. A pattern
    matches whole texts in any case, but the compiler knows anchors only at its ends."""
    cases = list(_cases(pattern))
    if len(cases) < 2 or not any(case.startswith("^") or _ends_anchored(case) for case in cases):
        return pattern
    inner = (case.removeprefix("^")[: -1 if _ends_anchored(case) else None] for case in cases)
    return f"^(?:{'|'.join(inner)})$"


def _ends_anchored(case: str) -> bool:
    escapes = len(case[:-1]) - len(case[:-1].rstrip("\\"))
    return case.endswith("$") and escapes % 2 == 0


def _cases(pattern: str) -> Iterator[str]:
    """Yield the alternatives of a pattern, divided at each | outside of groups and character classes."""
    depth, begin = 0, 0
    for i, character in _syntax(pattern):
        if character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            yield pattern[begin:i]
            begin = i + 1
    yield pattern[begin:]


def _syntax(pattern: str) -> Iterator[tuple[int, str]]:
    """Yield index and character of what is neither escaped nor in a character class."""
    in_class, is_escaped = False, False
    for i, character in enumerate(pattern):
        if is_escaped or character == "\\":
            is_escaped = not is_escaped
        elif in_class or character == "[":
            in_class = character != "]"
        else:
            yield i, character


def handed_over(pattern: str) -> str:
    """Return a pattern that the compiler reads as `pattern`, without texts that JSON writes with escapes."""
    pattern = _with_padded_groups(without_escaped(pattern))
    return _without_automaton(pattern) if _LARGE_BOUND.search(pattern) else pattern


def _without_automaton(pattern: str) -> str:
    """Return the pattern with an empty part, for which xgrammar 0.2.8 writes rules instead of one automaton, since it
    is not ASCII. Of a repetition with a bound above 128, automata are wrong: x*y{2,300} would match "yx"."""
    return f"^é{{0}}{pattern[1:]}" if pattern.startswith("^") else f"é{{0}}{pattern}"


def _with_padded_groups(pattern: str) -> str:
    """Return the pattern with an empty group before and after each repeated or optional group.

    xgrammar 0.2.8 makes a group optional with an edge from its first state to its last. A repetition that begins or
    ends the group has edges into the one or out of the other, so ^a(?:xy+)?b$ would match "ayb".
    """
    opened: list[int] = []
    added: dict[int, str] = {}
    for i, character in _syntax(pattern):
        if character == "(":
            opened.append(i)
        elif character == ")" and opened:
            begin = opened.pop()
            if pattern[i + 1 : i + 2] in ("?", "*", "+", "{"):
                added |= {begin: "(?:(?:)", i + 1: "(?:))"}
    return "".join(added.get(i, "") + character for i, character in enumerate(pattern))
