"""Converts JSON schemas of tools' arguments to TypeScript types in the style of harmony's prompts (openai/harmony,
docs/format.md). Called by `cluster.http.text.harmony_prompt`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 32  # deeper types are `any`
_SCALARS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}


def type_text(schema: Any, indent: str = "", depth: int = MAX_DEPTH) -> str:
    """Return the TypeScript type of `schema`; `any` for schemas without one.

    indent: prefix of the lines of an object's properties.
    """
    if not isinstance(schema, Mapping) or not depth:
        return "any"
    if isinstance(variants := schema.get("oneOf"), list):
        lines = [f"\n{indent} | {_variant(each, indent, depth)}{_notes(each)}" for each in variants]
        return "".join(lines)
    if isinstance(variants := schema.get("anyOf"), list) and variants:
        return " | ".join(dict.fromkeys(type_text(each, indent, depth - 1) for each in variants))
    match schema.get("type"):
        case list() as kinds if kinds:
            return " | ".join("number" if kind == "integer" else str(kind) for kind in kinds)
        case "object":
            return _object(schema, indent, depth)
        case "array":
            items = schema.get("items")
            return "Array<any>" if items is None else f"{type_text(items, indent, depth - 1)}[]"
        case "string" if named := [f'"{each}"' for each in _listed(schema, "enum") if isinstance(each, str)]:
            return " | ".join(named)
        case str() as kind:
            return _SCALARS.get(kind, "any")
    return "any"


def comment(text: str, indent: str = "") -> str:
    """Return `text` as comment lines."""
    return "".join(f"{indent}// {line}\n" for line in text.splitlines())


def _object(schema: Mapping[str, Any], indent: str, depth: int) -> str:
    text = comment(_string(schema, "description"), indent) + "{\n"
    properties, required = schema.get("properties"), set(filter(_is_text, _listed(schema, "required")))
    for key, value in properties.items() if isinstance(properties, Mapping) else ():
        named = f"{indent}{key}{'' if key in required else '?'}:"
        text += "".join(_property(named, value if isinstance(value, Mapping) else {}, indent, depth))
    return f"{text}{indent}}}"


def _property(named: str, schema: Mapping[str, Any], indent: str, depth: int) -> Iterator[str]:
    """Return the lines of one property. named: its name and colon."""
    if title := _string(schema, "title"):
        yield comment(title, indent) + f"{indent}//\n"
    variants = schema.get("oneOf")
    described = _string(schema, "description")
    if described and not isinstance(variants, list):
        yield comment(described, indent)
    if examples := [each for each in _listed(schema, "examples") if isinstance(each, str)]:
        yield f"{indent}// Examples:\n" + "".join(f'{indent}// - "{each}"\n' for each in examples)
    default = _default(schema)
    if not isinstance(variants, list):
        kind = _or_null(type_text(schema, f"{indent}    ", depth - 1), schema)
        yield f"{named} {kind},{f' // {default}' if default else ''}\n"
        return
    repeats = bool(variants) and described == _string(variants[0], "description")
    if described and not repeats:
        yield comment(described, indent)
    if default:
        yield f"{indent}// {default}\n"
    yield f"{named}\n"
    for i, each in enumerate(variants):
        # the first variant's description would repeat the property's
        yield f"{indent} | {_variant(each, indent, depth)}{_notes(each, described, i == 0 and not repeats)}\n"
    yield f"{indent},\n"


def _variant(schema: Any, indent: str, depth: int) -> str:
    return _or_null(type_text(schema, f"{indent}   ", depth - 1), schema)


def _notes(schema: Any, shown: str = "", is_described: bool = False) -> str:
    """Return the comment after a variant. shown: a description that is not repeated. is_described: no description is
    needed."""
    described = _string(schema, "description")
    keeps = described and described != shown and not (is_described and shown)
    notes = [*([" ".join(described.splitlines())] if keeps else []), *filter(None, [_default(schema)])]
    return f" // {' '.join(notes)}" if notes else ""


def _default(schema: Any) -> str:
    """Return the default value for a comment; strings are quoted unless they belong to an enumeration."""
    if not isinstance(schema, Mapping) or "default" not in schema:
        return ""
    value = schema["default"]
    if isinstance(value, str) and _listed(schema, "enum"):
        return f"default: {value}"
    return f"default: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"


def _or_null(kind: str, schema: Any) -> str:
    nullable = isinstance(schema, Mapping) and schema.get("nullable") is True
    return f"{kind} | null" if nullable and "null" not in kind else kind


def _string(schema: Any, key: str) -> str:
    value = schema.get(key) if isinstance(schema, Mapping) else None
    return value if isinstance(value, str) else ""


def _listed(schema: Any, key: str) -> list[Any]:
    value = schema.get(key) if isinstance(schema, Mapping) else None
    return value if isinstance(value, list) else []


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
