"""Characters of a schema's patterns that JSON writes as escapes: no answer contains them. Called by
`aerie.workers.structured_output.schema_patterns`; plain values, no torch.

xgrammar 0.2.8 excludes them only from patterns that become one automaton: not from those with a bound above 128 or
with other characters than ASCII, whose answers would be invalid JSON.
"""

import re

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
    return "".join(_without_escaped(found[0]) for found in _PART.finditer(pattern))


def _without_escaped(part: str) -> str:
    """part: a character, an escape or a character class."""
    if part == ".":
        return f"[^{_NOT}]"
    if part in _SETS:
        return f"[{_SETS[part]}]"
    if part.startswith("[^") and len(part) > 3:
        inner = part[2:-1]
        return f"[^{_NOT}{chr(92) if inner[0] == '-' else ''}{inner}]"
    if part.startswith("[") and len(part) > 2:
        inner = "".join(_item(found["low"], found["high"]) for found in _ITEM.finditer(part[1:-1]))
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
